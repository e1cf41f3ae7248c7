"""The other workers: processes of one host with the same secret, of which any serves any request.

An answer to a question belongs to the worker whose handler asked, a cancellation to the one that runs the call, a change to
those that have streams open; and a client with two connections meets two workers. So a worker passes on each message that it
cannot use itself, and every other worker checks whether it can. It sends:

    kind, uri                  a list or a resource has changed: listeners there hear of it
    ended                      a session has ended
    caller, session, message   a message of a session that belongs to another worker, or to all of them

1. Each worker listens on a socket in a folder that only its user can enter. The folder's name follows from the secret, so
   workers with the same secret find each other. Messages are sealed with the secret as well.
2. A worker does not wait for the others. It forgets one that is gone; one that does not take a message in time misses it;
   while too much waits for the others, further messages are dropped.
3. A worker that starts later has to know the sessions that have ended. They are marks: files in a folder of their own, named
   as `EndedSession` says, with the time of the session's opening as their own.
4. A worker holds a lock on the folder while it lives. A folder without a lock and without marks is left from workers that
   were killed: the next worker that starts removes it.
5. A session that has ended stays ended, however many others a caller ends after it. `within` is the rule: where too many
   have ended, the sessions of the caller with the most are forgotten one by one and replaced by the opening of the newest of
   them; every session of that caller that was opened until then counts as ended, unless this process knows that it is alive.
   So a caller that floods the list ends its own sessions early, and its client sends `initialize` again.
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
    from wirecall.mcp.server.sessions import Seals

PATIENCE = 5.0  # seconds for a worker to take a message
LIFETIME = 60.0
MARKED = 2 * 86_400.0  # seconds that a mark is kept: longer than the session it is about could live
MAX_MARKS = 10_000  # files; a worker looks for more with every `MARKS_ADDED` of its own
MARKS_ADDED = 1000
MAX_WAITING = 32 << 20  # bytes that the others have not taken yet
BACKLOG = 1024

EVERY_CALLER = "all"  # not a digest
SOCKET, MARKS = ".socket", "ended"
_FOLDER = re.compile(r"wirecall-[0-9]+-[0-9a-f]{12}")


class EndedSession(Struct, frozen=True):
    """A session that has ended."""

    caller: str  # a digest
    id: str
    opened: int

    @property
    def name(self) -> str:
        return f"{self.caller}.{self.id}"

    def is_among(self, opened: Callable[[str], int | None]) -> bool:
        """Return whether the session is listed, or a newer one of its caller stands for it; `opened` is the list."""
        if opened(self.name) is not None:
            return True
        return any((opened(several) or 0) >= self.opened for several in (self.caller, EVERY_CALLER))


def within(ended: Mapping[str, int], oldest: int, limit: int) -> dict[str, int]:
    """Return a list of ended sessions without those that are too old to matter, cut down to a limit.

    An entry without an id stands for every session of its caller that was opened until then.
    """
    kept = {name: opened for name, opened in ended.items() if opened >= oldest}
    while len(kept) > limit:
        (caller, number), *_ = Counter(name.partition(".")[0] for name in kept).most_common(1)
        if number == 1:  # no caller has more than one: that many callers end their sessions
            return {EVERY_CALLER: max(kept.values())}
        last = max(opened for name, opened in kept.items() if name.partition(".")[0] == caller)
        kept = {name: opened for name, opened in kept.items() if name.partition(".")[0] != caller}
        kept[caller] = last
    return kept


class Relay:
    """One worker among those with the same secret; if none is `shared`, it is alone and sends nothing.

    `on_end` and `on_message` take the messages of the others about sessions.
    """

    def __init__(
        self,
        hub: "Hub",
        seals: "Seals",
        *,
        shared: bool,
        on_end: Callable[[EndedSession], None],
        on_message: Callable[[str, str, bytes], None],
        folder: Path | None = None,
    ) -> None:
        user = os.getuid() if hasattr(os, "getuid") else 0
        self._folder = folder or Path(tempfile.gettempdir()) / f"wirecall-{user}-{seals.name}"
        self._marks = self._folder / MARKS
        self._hub = hub
        self._seals = seals
        self._shared = shared
        self._on_end = on_end
        self._on_message = on_message
        self._server: asyncio.AbstractServer | None = None
        self._path: Path | None = None  # of our socket
        self._lock = -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._marked = 0

    async def open(self) -> None:
        """Listen to the others, if there may be any. Raises `UsageError` if another user may enter the folder."""
        if not self._shared:
            return
        with suppress(OSError):  # a folder of temporary files need not be readable
            for path in self._folder.parent.iterdir():
                if path != self._folder and _FOLDER.fullmatch(path.name):
                    _remove_abandoned(path)
        while self._lock < 0:  # again, if another worker removes the folder meanwhile
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):
                found = self._folder.lstat()
                if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.getuid():
                    why = "another user could pretend to be a worker"
                    fix = "remove it, or set TMPDIR to a folder of your own"
                    raise UsageError(f"{self._folder} belongs to another user, or other users may enter it.", why, fix)
                lock = _locked(self._folder, exclusive=False)
                if self._folder.exists() and os.fstat(lock).st_ino == self._folder.lstat().st_ino:
                    self._lock = lock
                else:
                    os.close(lock)
        self._marks.mkdir(mode=0o700, exist_ok=True)
        self._forget_marks()
        name = f"{os.getpid()}-{os.urandom(3).hex()}"
        early = self._folder / f".{name}"
        self._server = await asyncio.start_unix_server(self._received, early, backlog=BACKLOG)
        # The others see it only now: between binding and listening it would refuse them, as a dead one does.
        self._path = early.rename(self._folder / f"{name}{SOCKET}")
        loop = asyncio.get_running_loop()

        def changed(kind: str, uri: str | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._tell, {"kind": kind, "uri": uri})

        self._hub.beyond = changed

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

    # --- messages to the others --------------------------------------------------------------------------------------

    def pass_on(self, caller: str, token: str | None, data: bytes) -> None:
        """Give the others what a session has sent."""
        if token is not None:
            self._tell({"caller": caller, "session": token, "message": data.decode()})

    def tell_ended(self, session: EndedSession) -> None:
        """Tell the others that a session has ended, also those that start later."""
        if self._server is None:
            return
        self._tell({"ended": session})
        self._marked += 1
        if self._marked % MARKS_ADDED == 0:
            self._forget_marks()
        try:
            self._mark(session.name, session.opened)
        except OSError as error:  # the disk is full, or the folder was removed
            logger.warning("the end of a session was not recorded for workers that start later: %s", error)

    def know_ended(self, session: EndedSession) -> bool:
        """Return whether a worker has seen the end of a session."""

        def opened(name: str) -> int | None:
            try:
                return (self._marks / name).stat().st_mtime_ns // 1_000_000
            except OSError:
                return None

        return self._server is not None and session.is_among(opened)

    def _tell(self, message: JsonObject) -> None:
        if self._server is None:
            return
        # Sealed, because a process without the secret could otherwise speak for any caller.
        sealed = self._seals.seal("relay", "", message, LIFETIME).encode()
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
            logger.warning("sending a message to another worker failed: %s", str(error) or "timed out")
        finally:
            self._waiting -= len(data)

    # --- marks -------------------------------------------------------------------------------------------------------

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
            for name, opened in kept.items() - marks.items():  # before those are removed that it stands for
                self._mark(name, opened)
            for name in marks.keys() - kept.keys():
                (self._marks / name).unlink(missing_ok=True)

    # --- messages of the others ----------------------------------------------------------------------------------------

    async def _received(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            data = bytearray()
            async with asyncio.timeout(PATIENCE):
                while chunk := await reader.read(1 << 16):
                    data += chunk
                    if len(data) > MAX_WAITING:
                        raise ValueError("too long")
            found = self._seals.open("relay", "", data.decode("ascii"))
            if found is None:
                raise ValueError("not sealed by a worker")
            told = msgspec.json.decode(found.value)
            if "kind" in told:
                self._hub.tell_here(told["kind"], told["uri"])
            elif "ended" in told:
                self._on_end(msgspec.convert(told["ended"], EndedSession))
            else:
                self._on_message(told["caller"], told["session"], told["message"].encode())
        except (ValueError, OSError, TimeoutError, LookupError) as error:
            logger.warning("a message from another worker is not readable: %r", error)
        finally:
            writer.close()


def _locked(folder: Path, *, exclusive: bool) -> int:
    """Return a descriptor that holds a lock on a folder; BlockingIOError if another process has one that excludes it."""
    import fcntl  # late: Windows does not have it

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder of this user in which no worker lives and no mark is young enough to matter."""
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
                left.rmdir() if left.name == MARKS else left.unlink()
            folder.rmdir()
        finally:
            os.close(lock)
