"""The file of an SQLite ledger: its statements, how it is opened, why it may be refused, and its troubles in our words."""

import copy
import ctypes
import os
import random
import struct
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import apsw

from wirecall.errors import UsageError
from wirecall.files import real_path
from wirecall.ledger.base import LedgerDown

PATIENCE = 5.0  # seconds that a write waits for the lock of the file
APPLICATION_ID = int.from_bytes(b"wcll", "big")
VERSION = 1

# WAL needs memory that all users of the file share, so they must live under one kernel.
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "fuse.sshfs", "fuse.glusterfs"}

_CREATING = threading.Lock()


def _statements() -> dict[str, str]:
    text = Path(__file__).with_name("sqlite.sql").read_text(encoding="utf-8")
    named = (part.partition("\n") for part in text.split("-- name: ")[1:])
    return {name: statement.strip() for name, _, statement in named}


SQL = _statements()


def open_file(path: str, columns: tuple[str, ...]) -> "tuple[apsw.Connection, apsw.Connection, Patience]":
    """A connection to write and one to read, to a file that is fit to be a ledger; and the patience of the first."""
    real = _prepare_file(path)
    patience = Patience()
    try:
        db = connect(real, patience)
        try:
            _make_fit(db, path, columns)
            reader = apsw.Connection(real, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_NOFOLLOW)
        except BaseException:
            db.close()
            raise
    except apsw.Error as error:
        raise as_down(path, error) from error
    reader.set_busy_timeout(1000)  # only while another process recovers the file after a crash
    return db, reader, patience


def _prepare_file(path: str) -> str:
    """Make the folder and the file for their owner alone, unless they exist; return the path of the file itself.

    SQLite gives the WAL, its index and the journals the rights of the file.
    """
    if os.path.isdir(path):
        raise UsageError(f"The ledger {path} is a folder.", fix="name a file in it")
    if (kind := _file_system(os.path.dirname(path))) in REMOTE:
        raise down(
            f"The ledger {path} is on a network file system ({kind}).",
            "SQLite's locks and shared memory do not reach other hosts",
            "use a local disk, or a ledger in PostgreSQL or Redis",
        )
    try:
        real = real_path(path, "The ledger")
        os.makedirs(os.path.dirname(real), mode=0o700, exist_ok=True)
        # To close a file drops all locks that this process has on it. So only a new one is touched here, and no other
        # thread connects to it before it is closed again.
        with _CREATING, suppress(FileExistsError):
            os.close(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise down(f"The ledger {path} cannot be opened.", str(error), _MAY_WRITE) from error
    return real


def _file_system(folder: str) -> str:
    """The type of the file system that a folder is on, where the system tells."""
    try:
        mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    here = os.path.realpath(folder) + "/"
    above = [(len(point), kind) for _, point, kind, *_ in reversed(mounts) if here.startswith(point.rstrip("/") + "/")]
    return max(above, key=lambda mount: mount[0], default=(0, ""))[1]  # the first of equals, so the last one mounted


def connect(path: str, patience: "Patience | None" = None) -> apsw.Connection:
    """Open a connection; `path` has no symbolic links, and none may take a place in it afterwards."""
    db = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW)
    try:
        db.set_busy_handler(patience or Patience())
        db.pragma("synchronous", "full")  # a commit is on the disk, not only with the kernel
        db.pragma("fullfsync", True)  # the same on macOS
    except BaseException:
        db.close()  # its error is kept for who asks next, and the connection with it
        raise
    return db


class Patience:
    """A busy handler. SQLite's own sleeps for up to 0.1 s, an age beside a commit of 0.3 ms; and without the chance in this
    one, processes that meet would go on meeting."""

    def __init__(self) -> None:
        self.is_over = False  # whoever is calling must not wait at all
        self._give_up_at = 0.0

    def __call__(self, tries: int) -> bool:
        if self.is_over:
            return False
        now = time.monotonic()
        if tries == 0:
            self._give_up_at = now + PATIENCE
        time.sleep(random.uniform(0.0001, 0.001))
        return now < self._give_up_at


def _make_fit(db: apsw.Connection, path: str, columns: tuple[str, ...]) -> None:
    _check_owner(db, path)
    _use_wal(db, path)
    if not db.execute(SQL["has_ledger"]).get:
        _create_tables(db)
    _check_tables(db, path, columns)


def _check_owner(db: apsw.Connection, path: str) -> None:
    """Before anything is changed: a file of another program is not ours to use; one without an owner may be the user's."""
    if db.readonly("main"):
        raise down(f"The ledger {path} is read-only.", fix="let this process write to it")
    owner = db.pragma("application_id")
    if owner == 0 and db.execute(SQL["is_empty"]).get:
        db.pragma("application_id", APPLICATION_ID)
    elif owner not in (0, APPLICATION_ID) and not db.execute(SQL["has_ledger"]).get:
        raise UsageError(
            f"The file {path} belongs to another program.",
            f"its application_id is {owner:#x}",
            "name a file of your own; if this one is yours, set its application_id to 0",
        )


def _use_wal(db: apsw.Connection, path: str) -> None:
    patience = Patience()
    for tries in count():
        try:
            mode = db.pragma("journal_mode", "wal")
            break
        except apsw.BusyError:  # another process is at it; here SQLite does not ask the busy handler
            if not patience(tries):
                raise
    if mode != "wal":
        raise down(f"The ledger {path} cannot use WAL.", f"SQLite stays in mode {mode!r}", "use a file on a local disk")


def _create_tables(db: apsw.Connection) -> None:
    db.execute(SQL["begin"])
    if not db.execute(SQL["has_ledger"]).get:  # another process may have been faster
        db.execute(SQL["schema"])
    db.execute(SQL["commit"])


def _check_tables(db: apsw.Connection, path: str, expected: tuple[str, ...]) -> None:
    try:
        version = db.execute(SQL["version"]).get
    except apsw.SQLError:
        version = None
    if isinstance(version, int) and version > VERSION:
        raise down(
            f"The ledger {path} was made by a newer wirecall.",
            f"its tables have version {version}, and this wirecall knows {VERSION}",
            "upgrade wirecall",
        )
    columns = tuple(name for (name,) in db.execute(SQL["columns"]))
    if version != VERSION or columns != expected:
        raise UsageError(
            f"The file {path} has tables with the ledger's names that are not those of this wirecall.",
            f"wirecall_commands has the columns {', '.join(columns)}; here they are {', '.join(expected)}",
            "use the wirecall that made them, or rename them, or name another file",
        )


class Place:
    """Where a ledger lies: whether its path still names the files that are open.

    One that was removed or replaced would take our writes, and nobody would ever read them; so this is asked before every
    commit. To ask by name is slow after the last one has blocked, 20 us for two, because it touches so much. A folder has
    a time that changes with the names in it: while that stands still, so do they. Three things remain: a change within the
    same tick of the clock, so a time is not relied on before it is old (`SETTLED`); a change further up, so the names are
    asked for every second all the same; and a path that is a link, whose file and WAL are in a folder of their own.
    """

    SETTLED = 1.0  # seconds
    AGAIN = 1.0

    def __init__(self, path: str) -> None:
        self._path = path
        self._names = os.fsencode(path), os.fsencode(os.path.realpath(path) + "-wal")
        self._file, self._wal = map(identity, self._names)
        self._known = -1  # the time of the folder when the names were right; -1 where it does not tell
        self._ask_at = 0.0
        self._folder = None if os.path.islink(path) else _opened(os.path.dirname(path))

    def check(self) -> None:
        try:
            changed = -1 if self._folder is None else os.fstat(self._folder).st_ctime_ns
        except OSError:  # its disk is gone; the names will tell
            changed = -1
        now = time.monotonic()
        if changed != self._known or now >= self._ask_at or changed == -1:
            self._check_names()
            self._ask_at = now + self.AGAIN
            self._known = changed if 0 <= changed < time.time_ns() - self.SETTLED * 1e9 else -1

    def _check_names(self) -> None:
        file, wal = map(identity, self._names)
        self._wal = self._wal or wal  # it is made by the first who needs it, and stays as long as anybody has the file open
        if file is None or file != self._file or wal != self._wal:
            raise down(
                f"The ledger {self._path} was removed or replaced while it was open.",
                "what is written now would be lost, and with it the knowledge of what was done",
                "bring the file back with its -wal, or restart to begin a new ledger",
            )

    def close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            os.close(folder)


def _opened(folder: str) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY)
    except OSError:  # not every system opens folders, and not every folder may be read
        return None


def identity(path: str | bytes) -> tuple[int, int] | None:
    """Which file a path names.

    `stat` reads the times too. Once somebody has read them, Linux (6.18 here) gives the next write a finer one, at the
    price of a change to the inode: a commit took 220 us after `stat` of the WAL, 165 after `statx` without mtime and ctime.
    """
    found = _Statx()
    if _statx is not None and _statx(_HERE, os.fsencode(path), 0, _STATX_INO, found) == 0:
        number, *device = _NUMBER_AND_DEVICE.unpack_from(found)
        return number, os.makedev(*device)
    try:
        told = os.stat(path)
    except OSError:
        return None
    return told.st_ino, told.st_dev


_statx = getattr(ctypes.CDLL(None), "statx", None) if sys.platform == "linux" else None
_Statx = ctypes.c_char * 256
_HERE = -100  # AT_FDCWD: relative paths are relative to the working directory
_STATX_INO = 0x100
_NUMBER_AND_DEVICE = struct.Struct("=32xQ96xII")  # stx_ino is at 32, stx_dev_major and stx_dev_minor at 136
if _statx is not None:
    _statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)


def as_down(path: str, error: Exception) -> LedgerDown:
    """The same trouble in our words, as a new exception for each who waits."""
    if isinstance(error, LedgerDown):
        return copy.copy(error)
    for kind, what, fix in _TROUBLES:
        if isinstance(error, kind):
            return down(f"The ledger {path} {what}.", str(error), fix)
    return down(f"The ledger {path} cannot be used.", f"{type(error).__name__}: {error}")


def down(what: str, why: str = "", fix: str = "") -> LedgerDown:
    return LedgerDown(str(UsageError(what, why, fix)))


_MAY_WRITE = "see that its folder exists and that this process may write to it"
_TROUBLES: tuple[tuple[type[apsw.Error], str, str], ...] = (
    (apsw.FullError, "has no room left", "free space on its disk; the ledger goes on by itself"),
    (
        apsw.BusyError,
        f"was locked for more than {PATIENCE:g} s",
        "find the process, or the handler in a transaction, that holds it; the ledger goes on by itself",
    ),
    (apsw.ReadOnlyError, "is read-only", "let this process write to the file and its folder"),
    (apsw.CantOpenError, "cannot be opened", _MAY_WRITE),
    (apsw.NotADBError, "is not an SQLite file", "name another file"),
    (apsw.CorruptError, "is damaged", "restore it from a backup, with its -wal"),
    (apsw.IOError, "cannot be read or written", "see what the kernel's log says about the disk"),
    (apsw.ConstraintError, "refused the record", "a field is not what its table asks for"),
    (apsw.ConnectionClosedError, "is closed", ""),
    (apsw.CursorClosedError, "is closed", ""),
)
