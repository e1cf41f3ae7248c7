"""The audit trail: one JSON line per command, chained by hashes (T6).

`App(audit="file:PATH")` appends a line for every admitted command: its caller, method, time, key
and id, the digest of its arguments, how it ended, whether the answer was a replay, how long it
took, and the ids by which logs and traces name it. Arguments and results stay out. A second line
says that the answer to a call without a key was lost.

The rules of the file:

1. Every line carries the hash of the line before it and its own, so `verify` finds a line that was
   edited, removed or moved. A program that can rewrite the whole file can forge the whole chain:
   keep the newest hash elsewhere.
2. Many processes may append to one file. A lock on the file orders them, and each continues the
   chain where it stands.
3. A line is one write at the end of the file. A process that is killed in the middle, or a full
   disk, leaves a torn line, which `verify` reports, and the next entry begins on a new line.
4. A file that was moved away stays untouched, and a new one begins under the name. So does the file
   that `rotate` limits, which is kept under its name and a number. The first line of the new file
   has the member `continues` and refers to the last line of the old one, so `wirecall audit verify`
   finds that a file is missing. A truncated file does not begin a new one: the next line refers to
   the last one that was written, so `verify` reports the gap.
5. A command that was done stays done if its line cannot be written. Each such failure is logged as
   an error. With `required`, a command has a line before it runs, too ("begun"), and it is refused
   if that line cannot be written.
6. An event loop never waits for the lock. If the lock is taken, a thread waits for it, and later
   lines queue behind the first until that thread has written them all; without a loop the call
   waits in place. The wait is bounded: the holder of the lock may have been stopped, or may be
   another program. With `fsync`, a line is on the disk before the next one is written, and so is
   the name of a new file. A thread waits for the disk.
"""

import asyncio
import glob
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Struct

from wirecall.aio import has_loop
from wirecall.errors import AuditUnavailable, UsageError
from wirecall.files import IS_PORTABLE, DescriptorLock, Lock, TransactionLock, real_path
from wirecall.logs import host, logger
from wirecall.protocol.messages import Json, JsonObject
from wirecall.server.call import CallEnded

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

FIRST = "0" * 64
# The bytes that are first read to find the last line; most lines are shorter.
TAIL = 65_536
# Seconds to wait for the lock; writing a line takes about 0.00005.
PATIENCE = 1.0
# Seconds between two attempts to take the lock.
AGAIN = 0.0002
NAME = "The audit trail"


class AuditEntry(Struct, frozen=True, kw_only=True):
    """One call of a command, as a line of the trail."""

    time: float
    caller: str
    # The method as in the ledger: a tool's is tools/call:NAME.
    method: str
    key: str | None
    # The ledger's fingerprint of the arguments.
    digest: str
    id: Json
    # "begun", on a separate line: it is about to run; "ok" or "error"; "cancelled": its caller left,
    # or it timed out; "input required": its caller was asked; "undelivered", on a separate line: the
    # answer to a call without a key did not reach its caller.
    outcome: str
    code: int | None
    replayed: bool
    duration_ms: float
    # Whether the call repeats one whose answer was lost, and received that answer.
    recognised: bool = False
    # Clients count their ids from 1: `call_id` is unique among all processes, as in the log and the
    # span.
    call_id: str | None = None
    trace_id: str | None = None
    # The X-Request-Id of its HTTP request.
    request_id: str | None = None
    host: str | None = None
    pid: int | None = None
    # The fingerprint of the arguments of a call with references, with their values in them.
    filled: str | None = None
    # The `call_id` of the batch tool's call that this call was an entry of.
    batch: str | None = None
    # What the method was declared to do; without a declaration, the worst is assumed, as MCP does.
    destructive: bool | None = None
    open_world: bool | None = None
    # What a person did, if the line is not about a call: `caller` is the person then.
    action: JsonObject | None = None


def _digest_of(ended: CallEnded) -> str | None:
    """Return the fingerprint of arguments that references have filled in."""
    if ended.filled is UNSET:
        return None
    from wirecall.server.policy import fingerprint  # late: few calls have references

    return fingerprint(ended.filled).hex()


class Audit:
    """An open audit trail.

    `portable` selects the lock: all processes that share a file need the same kind.
    """

    def __init__(
        self,
        path: str,
        *,
        portable: bool = IS_PORTABLE,
        required: bool = False,
        fsync: bool = False,
        rotate: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.required = required
        self._portable = portable
        self._fsync = fsync
        # The size in bytes at which a new file begins.
        self._rotate = rotate
        if rotate is not None and portable:
            raise UsageError(
                "An audit trail cannot be rotated on this system.",
                "an open file cannot be replaced here",
                "drop rotate, and move the file while the server is stopped",
            )
        # Raises when the app starts; after a command the error could only be logged.
        real_path(path, NAME)
        self._begin()
        self._last = FIRST

    def _begin(self) -> None:
        """Reset the state, initially and after a fork.

        After a fork the open file and its lock belong to the parent.
        """
        self._pid = os.getpid()
        # The lock on the file keeps other processes away, not other threads.
        self._writing = threading.Lock()
        self._file: int | None = None
        self._lock: Lock = DescriptorLock()
        # The size of the file after this process's last line; -1 if it is not known.
        self._seen = -1
        # The last hash of the file that this process wrote to before, if that was moved away.
        self._carried: str | None = None
        # Its one thread writes the waiting lines in order.
        self._late: ThreadPoolExecutor | None = None
        # Unwritten lines, which other lines must not overtake.
        self._waiting: set[Future[None]] = set()
        self._ends_at = math.inf

    def note(self, ended: CallEnded) -> None:
        """Add a line about a command's call that has just ended, unless its params did not fit."""
        if ended.fingerprint is not None:
            self.append(_entry_of(ended, ended.fingerprint))

    async def begin(self, begun: CallEnded) -> None:
        """Add a line about a command that is about to run; refuse it if that is impossible."""
        assert begun.fingerprint is not None
        entry = _entry_of(begun, begun.fingerprint)
        give_up_at = time.monotonic() + PATIENCE
        try:
            if self._pid != os.getpid():
                self._begin()
            if not has_loop():
                self._add_or_raise(entry, give_up_at)
            elif self._waiting or self._fsync or not self._add(entry):
                late = self._submit(partial(self._add_or_raise, entry, give_up_at))
                await asyncio.wrap_future(late)
        except Exception as error:
            logger.error(
                "the audit trail %s cannot be written, so %s %s is refused: %s",
                self.path,
                entry.method,
                entry.key,
                error,
            )
            raise AuditUnavailable("the audit trail cannot be written", ran="no") from error

    def append(self, entry: AuditEntry) -> None:
        """Add a line. A failure is logged, because the command is done already."""
        if self._pid != os.getpid():
            self._begin()
        try:
            waits = self._waiting or (self._fsync and has_loop())
            if not waits and self._add(entry):
                return
            give_up_at = time.monotonic() + PATIENCE
            if self._waiting or has_loop():  # the event loop must not wait
                self._submit(partial(self._add_in_time, entry, give_up_at))
            else:
                self._add_in_time(entry, give_up_at)
        except Exception as error:
            self._log_lost(entry, error)

    async def aclose(self, grace: float) -> None:
        """Close the trail after the lines that wait for the lock; they have `grace` seconds."""
        self._ends_at = time.monotonic() + grace
        if self._late is not None:
            await asyncio.to_thread(self._late.shutdown)
        self.close()

    def close(self) -> None:
        if self._late is not None:
            self._late.shutdown()
        # The app may serve again.
        self._late = None
        self._ends_at = math.inf
        self._forget_file()

    def _add(self, entry: AuditEntry) -> bool:
        """Write a line, unless another process has the lock; return whether it was written."""
        with self._writing:
            while True:
                file = self._open()
                lock = self._lock
                if not lock.take(file):
                    return False
                try:
                    is_here = _is_at(self.path, file)
                    if is_here:
                        self._write(file, entry)
                    else:
                        self._leave(file)
                finally:
                    lock.give_back(file)
                    if file != self._file:
                        os.close(file)
                        lock.close()
                if is_here:
                    return True

    def _leave(self, file: int) -> None:
        """Leave a file that was moved away. It stays untouched, and the chain continues elsewhere.

        Another process may have begun the new file already.
        """
        if not self.path.exists() or self.path.stat().st_size == 0:
            logger.warning("the audit trail %s was moved or removed: a new one begins", self.path)
        self._carried, _ = _end_of(file, os.fstat(file).st_size)
        self._file = None
        self._seen = -1

    def _open(self) -> int:
        """Return the open file."""
        if self._file is None:
            real = real_path(self.path, NAME)
            os.makedirs(os.path.dirname(real), exist_ok=True)
            is_new = not os.path.exists(real)
            self._file = _open_trail(real)
            if is_new and self._fsync:
                _sync_folder(real)
            if self._portable:
                self._lock = TransactionLock(real)
            else:
                self._lock = DescriptorLock()
        return self._file

    def _write(self, file: int, entry: AuditEntry) -> None:
        """Write a line at the end of the chain. The caller has the lock."""
        # Step 1: the end of the chain. Another process may have written since, or a line may be
        # torn.
        size = os.fstat(file).st_size
        torn = False
        if size != self._seen:
            last, torn = _end_of(file, size)
            if size < self._seen:
                logger.error(
                    "the audit trail %s was cut: %d bytes are missing",
                    self.path,
                    self._seen - size,
                )
            else:
                self._last = last
        # Step 2: a new file, if this one is large enough. A folder that refuses it costs no line.
        if self._rotate is not None and size >= self._rotate:
            try:
                self._write_to_next(file, entry)
                return
            except OSError as error:
                logger.error("the audit trail %s cannot be rotated: %s", self.path, error)
        # Step 3: the line.
        continues = None
        if size == 0 and self._carried is not None:
            self._last = self._carried
            continues = ""  # its name is not known here
        self._carried = None
        data, own = _line(entry, self._last, continues)
        # After an incomplete write, the next line looks for the end.
        self._seen = -1
        self._put(file, b"\n" * torn + data)
        self._seen = size + torn + len(data)
        self._last = own

    def _put(self, file: int, data: bytes) -> None:
        if os.write(file, data) < len(data):
            raise OSError("only a part of it could be written")
        if self._fsync:
            os.fsync(file)

    def _write_to_next(self, file: int, entry: AuditEntry) -> None:
        """Keep the file under its name and a number, and begin a new one with this line.

        Under its own name there is a file at every moment, so no other process begins one.
        """
        real = real_path(self.path, NAME)
        kept = self._keep(real)
        data, own = _line(entry, self._last, os.path.basename(kept))
        fresh = f"{real}.new"
        with suppress(FileNotFoundError):
            os.unlink(fresh)
        opened = _open_trail(fresh)
        try:
            self._put(opened, data)
            os.rename(fresh, real)
            if self._fsync:
                _sync_folder(real)
        except BaseException:
            os.close(opened)
            os.unlink(kept)
            raise
        self._file = opened
        self._lock = DescriptorLock()
        self._seen = len(data)
        self._last = own

    def _keep(self, real: str) -> str:
        """Give the file a name with a number, unless a process that was killed has done that."""
        kept = kept_files(self.path)
        if kept and os.path.samefile(kept[-1], real):
            return str(kept[-1])
        number = 1
        if kept:
            number += int(kept[-1].suffix[1:])
        os.link(real, f"{real}.{number}")
        return f"{real}.{number}"

    def _submit(self, work: Callable[[], None]) -> "Future[None]":
        """Let a thread write a line, after the lines that already wait."""
        with self._writing:
            if self._late is None:
                from concurrent.futures import ThreadPoolExecutor  # late: few apps need it

                self._late = ThreadPoolExecutor(1, "wirecall-audit")
            late = self._late.submit(work)
        self._waiting.add(late)
        late.add_done_callback(self._waiting.discard)
        return late

    def _add_in_time(self, entry: AuditEntry, give_up_at: float) -> None:
        """Write a line as soon as the lock is free, or log that it cannot be written."""
        try:
            self._add_or_raise(entry, give_up_at)
        except Exception as error:
            self._log_lost(entry, error)

    def _add_or_raise(self, entry: AuditEntry, give_up_at: float) -> None:
        """Write a line as soon as the lock is free."""
        while not self._add(entry):
            if time.monotonic() > min(give_up_at, self._ends_at):
                raise TimeoutError("another process has had its lock for too long")
            time.sleep(AGAIN)

    def _log_lost(self, entry: AuditEntry, error: Exception) -> None:
        logger.error(
            "the audit trail %s has no line for %s %s: %s",
            self.path,
            entry.method,
            entry.key,
            error,
        )

    def _forget_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._lock.close()


def _entry_of(call: CallEnded, fingerprint: bytes) -> AuditEntry:
    return AuditEntry(
        time=time.time(),
        caller=call.caller,
        method=call.method,
        key=call.key,
        digest=fingerprint.hex(),
        id=call.ids.correlation_id,
        outcome=call.outcome,
        code=call.code,
        replayed=call.replayed,
        duration_ms=round(call.duration_ms, 3),
        recognised=call.recognised,
        call_id=call.ids.call_id,
        trace_id=call.ids.trace_id,
        request_id=call.ids.request_id,
        host=host(),
        pid=os.getpid(),
        filled=_digest_of(call),
        batch=call.batch,
        destructive=call.destructive,
        open_world=call.open_world,
    )


def _line(entry: AuditEntry, previous: str, continues: str | None) -> tuple[bytes, str]:
    """Return a line and its hash, over everything before the member `hash`, which is the last."""
    members = msgspec.to_builtins(entry)
    if continues is not None:
        members["continues"] = continues
    members["previous"] = previous
    body = msgspec.json.encode(members)[:-1]
    own = hashlib.sha256(body).hexdigest()
    return b'%b%b%b"}\n' % (body, _HASH_MEMBER, own.encode()), own


def _open_trail(real: str) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY"):  # no system has all of them
        flags |= getattr(os, name, 0)
    return os.open(real, flags, 0o600)


def _sync_folder(real: str) -> None:
    """Put the names of a folder's files on the disk: a file without its name is lost."""
    if IS_PORTABLE:  # such systems open no folders
        return
    folder = os.open(os.path.dirname(real), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def kept_files(path: Path) -> list[Path]:
    """Return the files that a trail was kept in when it was rotated, the oldest first."""
    found = [
        each
        for each in path.parent.glob(f"{glob.escape(path.name)}.*")
        if each.suffix[1:].isdecimal() and each.stem == path.name
    ]
    return sorted(found, key=lambda each: int(each.suffix[1:]))


class Report(Struct, frozen=True):
    """The result of `verify`."""

    lines: int
    # The hash of the last line.
    last: str
    # Every problem, with the number of its line.
    problems: list[tuple[int, str]]
    # The hash of the last line of the file before this one, if it continues one.
    continues: str | None = None

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(path: str | Path) -> Report:
    """Read a file of a trail from its beginning and check every link of the chain.

    `path` is the file. Raises `OSError` if it cannot be read.

    >>> from pathlib import Path
    >>> Path("audit.jsonl").touch()
    >>> verify("audit.jsonl").ok
    True
    """
    with open(path, "rb") as file:
        return verify_lines(file)


def is_missing(report: Report, others: Iterable[Report]) -> bool:
    """Return whether a file continues one that is not among the others."""
    if report.continues is None:
        return False
    return all(other.last != report.continues for other in others)


def verify_lines(lines: Iterable[bytes]) -> Report:
    """Check every link of the chain in these lines."""
    previous = FIRST
    continues = None
    problems = []
    number = 0
    for number, line in enumerate(lines, start=1):
        links = _links(line)
        if links is None:
            problems.append((number, "not a line of an audit trail, or torn"))
            continue
        if number == 1 and links.continues is not None:
            continues = links.previous
        elif links.previous != previous:
            problems.append(
                (number, "does not follow the line before it: a line was removed, added or moved")
            )
        # The hash does not cover bytes after it, so there must not be any.
        body = line[: line.rfind(_HASH_MEMBER)]
        whole = b'%b%b%b"}' % (body, _HASH_MEMBER, links.hash.encode())
        if line.removesuffix(b"\n") != whole or hashlib.sha256(body).hexdigest() != links.hash:
            problems.append((number, "was edited: its hash does not match"))
        previous = links.hash
    return Report(number, previous, problems, continues)


class _Links(Struct):
    previous: str
    hash: str
    continues: str | None = None


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
        # Appending does not depend on the position.
        os.lseek(file, max(0, size - length), os.SEEK_SET)
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
