"""The audit trail: one JSON line per command, chained by hashes (T6).

`App(audit="file:PATH")` appends a line for every admitted command: its caller, method, time, key and id, the digest of its
arguments, how it ended, whether the answer was a replay, how long it took. Arguments and results stay out. A second line
says that the answer to a call without a key was lost.

The rules of the file:

1. Every line carries the hash of the line before it and its own, so that a line that was edited, removed or put elsewhere
   is found by `verify`. A program that can rewrite the whole file can forge the whole chain: keep the newest hash elsewhere.
2. Many processes may append to one file. A lock on the file orders them, and each continues the chain where it stands.
3. A line is one write at the end of the file. A process that is killed in the middle, or a disk that is full, leaves a torn
   line, which `verify` reports, and the next line begins on a new one.
4. A file that was moved away is left alone, and a new trail begins under the name. One that was cut is not: the next line
   follows the last one that was written, so that `verify` reports the gap.
5. A command that was done stays done when its line cannot be written: that is logged as an error, every time.
6. An event loop never waits for the lock. A line that finds it taken goes to a thread that waits, and the lines after it
   stand behind it until that thread has written them all; without a loop the call waits in place. No line waits for ever:
   the holder of the lock may have been stopped, or may be another program.
"""

import asyncio
import hashlib
import math
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from wirecall.files import IS_PORTABLE, DescriptorLock, Lock, TransactionLock, real_path
from wirecall.logs import logger
from wirecall.protocol.messages import Json
from wirecall.server.call import CallEnded
from wirecall.stepping import has_loop

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

FIRST = "0" * 64
TAIL = 65_536  # more than most lines have
PATIENCE = 1.0  # seconds for the lock; another line is written in some 0.00005
AGAIN = 0.0002  # seconds until it is tried again
NAME = "The audit trail"


class AuditEntry(Struct, frozen=True, kw_only=True):
    """One call of a command, as a line of the trail."""

    time: float
    caller: str
    method: str  # as in the ledger: a tool's is tools/call:NAME
    key: str | None
    digest: str  # of the arguments, as the ledger's fingerprint
    id: Json
    # ok, error; cancelled: its caller left, or its time was over; input required: its caller was asked; undelivered, a line
    # of its own: the answer to a call without a key did not reach its caller
    outcome: str
    code: int | None
    replayed: bool
    duration_ms: float
    recognised: bool = False  # the call repeats one whose answer was lost, and got that call's answer


class Audit:
    """An open audit trail. `portable` selects the lock: all processes that share a file need the same kind."""

    def __init__(self, path: str, *, portable: bool = IS_PORTABLE) -> None:
        self.path = Path(path)
        self._portable = portable
        real_path(path, NAME)  # a mistake shows when the app starts; after a command it could only be logged
        self._begin()
        self._last = FIRST

    def _begin(self) -> None:
        """Start afresh, at first and after a fork: an open file and its lock belong to the other process."""
        self._pid = os.getpid()
        self._writing = threading.Lock()  # the lock on the file keeps other processes away, not other threads
        self._file: int | None = None
        self._lock: Lock = DescriptorLock()
        self._seen = -1  # size of the file after our own last line
        self._late: ThreadPoolExecutor | None = None  # its one thread writes the lines that wait, in their order
        self._waiting: set[Future[None]] = set()  # lines that are not written yet: no other may overtake them
        self._ends_at = math.inf

    def note(self, ended: CallEnded) -> None:
        """Add a line about a call of a command that has just ended; a call whose params did not fit has none."""
        if ended.fingerprint is None:
            return
        self.append(
            AuditEntry(
                time=time.time(),
                caller=ended.caller,
                method=ended.method,
                key=ended.key,
                digest=ended.fingerprint.hex(),
                id=ended.correlation_id,
                outcome=ended.outcome,
                code=ended.code,
                replayed=ended.replayed,
                duration_ms=round(ended.duration_ms, 3),
                recognised=ended.recognised,
            )
        )

    def append(self, entry: AuditEntry) -> None:
        """Add a line. A failure is logged, because the command is done already."""
        if self._pid != os.getpid():
            self._begin()
        try:
            if self._waiting or not self._add(entry):
                give_up_at = time.monotonic() + PATIENCE
                if not self._waiting and not has_loop():
                    self._add_in_time(entry, give_up_at)
                else:  # the event loop must not wait
                    with self._writing:
                        if self._late is None:
                            from concurrent.futures import ThreadPoolExecutor  # late: few apps need it

                            self._late = ThreadPoolExecutor(1, "wirecall-audit")
                        late = self._late.submit(self._add_in_time, entry, give_up_at)
                    self._waiting.add(late)
                    late.add_done_callback(self._waiting.discard)
        except Exception as error:
            self._log_lost(entry, error)

    async def aclose(self, grace: float) -> None:
        """Close it, after the lines that wait for the lock: they have `grace` seconds from now."""
        self._ends_at = time.monotonic() + grace
        if self._late is not None:
            await asyncio.to_thread(self._late.shutdown)
        self.close()

    def close(self) -> None:
        if self._late is not None:
            self._late.shutdown()
        self._late, self._ends_at = None, math.inf  # the app may serve again
        self._forget_file()

    def _add(self, entry: AuditEntry) -> bool:
        """Write a line, unless another process has the lock on the file; return whether it was written."""
        with self._writing:
            # Step 1: the file. One that was moved away is left alone.
            if self._file is not None and not _is_at(self.path, self._file):
                logger.warning("the audit trail %s was moved or removed: a new one begins", self.path)
                self._forget_file()
                self._seen = -1
            if self._file is None:
                real = real_path(self.path, NAME)
                os.makedirs(os.path.dirname(real), exist_ok=True)
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
                for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY"):  # no system has all of them
                    flags |= getattr(os, name, 0)
                self._file = os.open(real, flags, 0o600)
                if self._portable:
                    self._lock = TransactionLock(real)
            file = self._file
            if not self._lock.take(file):
                return False
            try:
                # Step 2: the end of the chain. Another process may have written since, or a line may be torn.
                size = os.fstat(file).st_size
                torn = False
                if size != self._seen:
                    last, torn = _end_of(file, size)
                    if size < self._seen:
                        logger.error("the audit trail %s was cut: %d bytes are missing", self.path, self._seen - size)
                    else:
                        self._last = last
                # Step 3: the line, and its hash over everything before the member `hash`, which is the last.
                body = msgspec.json.encode({**msgspec.to_builtins(entry), "previous": self._last})[:-1]
                own = hashlib.sha256(body).hexdigest()
                data = b"\n" * torn + b'%b%b%b"}\n' % (body, _HASH_MEMBER, own.encode())
                self._seen = -1  # unless all of it is written, the next line looks for the end
                if os.write(file, data) < len(data):
                    raise OSError("only a part of it could be written")
                self._seen, self._last = size + len(data), own
            finally:
                self._lock.give_back(file)
        return True

    def _add_in_time(self, entry: AuditEntry, give_up_at: float) -> None:
        try:
            while not self._add(entry):
                if time.monotonic() > min(give_up_at, self._ends_at):
                    raise TimeoutError("another process has had its lock for too long")
                time.sleep(AGAIN)
        except Exception as error:
            self._log_lost(entry, error)

    def _log_lost(self, entry: AuditEntry, error: Exception) -> None:
        logger.error("the audit trail %s has no line for %s %s: %s", self.path, entry.method, entry.key, error)

    def _forget_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._lock.close()


class Report(Struct, frozen=True):
    """The result of `verify`: the number of lines, the hash of the last one, and every problem with its line number."""

    lines: int
    last: str
    problems: list[tuple[int, str]]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(path: str | Path) -> Report:
    """Read a trail from its beginning and check every link of the chain."""
    with open(path, "rb") as file:
        return verify_lines(file)


def verify_lines(lines: Iterable[bytes]) -> Report:
    """Check every link of the chain in these lines."""
    previous, problems, number = FIRST, [], 0
    for number, line in enumerate(lines, start=1):
        links = _links(line)
        if links is None:
            problems.append((number, "not a line of an audit trail, or torn"))
            continue
        if links.previous != previous:
            problems.append((number, "does not follow the line before it: a line was removed, added or moved"))
        # The hash does not cover bytes behind it, so there must be none.
        body = line[: line.rfind(_HASH_MEMBER)]
        whole = b'%b%b%b"}' % (body, _HASH_MEMBER, links.hash.encode())
        if line.removesuffix(b"\n") != whole or hashlib.sha256(body).hexdigest() != links.hash:
            problems.append((number, "was edited: its hash does not match"))
        previous = links.hash
    return Report(number, previous, problems)


class _Links(Struct):
    previous: str
    hash: str


_decode_links = msgspec.json.Decoder(_Links).decode
_HASH_MEMBER = b',"hash":"'


def _links(line: bytes) -> _Links | None:
    try:
        return _decode_links(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _end_of(file: int, size: int) -> tuple[str, bool]:
    """Return the hash of the last whole line, and whether a torn one follows it."""
    length = TAIL
    while True:
        os.lseek(file, max(0, size - length), os.SEEK_SET)  # lines are appended, wherever the position is
        tail = os.read(file, length)
        torn = bool(tail) and not tail.endswith(b"\n")
        for line in reversed(tail.splitlines()):
            if (links := _links(line)) is not None:
                return links.hash, torn
        if length >= size:
            return FIRST, torn
        length *= 8


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
