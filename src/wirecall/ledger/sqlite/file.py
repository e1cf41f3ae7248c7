"""The file of an SQLite ledger: its statements, how it is opened, why it may be refused, and its errors in our words."""

import copy
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

import apsw

from wirecall.errors import UsageError
from wirecall.files import real_path
from wirecall.ledger.base import Delivery, LedgerDown

PATIENCE = 5.0  # seconds that a write waits for the lock of the file
APPLICATION_ID = int.from_bytes(b"wcll", "big")

# WAL needs memory that all users of the file share, so they must live under one kernel.
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "fuse.sshfs", "fuse.glusterfs"}

# How long a folder must not have changed before its time is relied on, and how long it is; in seconds.
SETTLED = 1.0
AGAIN = 1.0

_creating = threading.Lock()
_text = Path(__file__).with_name("sqlite.sql").read_text(encoding="utf-8")
SQL = {name: text.strip() for name, _, text in (part.partition("\n") for part in _text.split("-- name: ")[1:])}
SCHEMA = [text for name, text in SQL.items() if name.startswith("schema ")]  # each makes a version of the tables


class Row(NamedTuple):
    """A row of wirecall_commands, as `SELECT *` returns it."""

    caller: str
    method: str
    key: str
    fingerprint: bytes
    state: str
    fence: int
    nonce: bytes
    committed: int
    attempts: int
    lease: float
    lease_until: float
    boot: bytes
    due: float
    expires_at: float
    started_at: float
    completed_at: float | None = None
    outcome_kind: Literal["result", "error"] | None = None
    payload: bytes | None = None
    digest: bytes | None = None
    delivery: Delivery | None = None
    deliverer: bytes | None = None
    answer_at: float | None = None
    answer_boot: bytes | None = None
    likeness: bytes | None = None


class LedgerFile:
    """An open ledger: a connection that writes, one that reads, and whether the path still names this file.

    Writes to a file that was removed or replaced would be lost, so `check` comes before every commit. To look up both names
    each time is slow: Linux gives a file whose times were just read a finer time with its next write, and a commit then
    takes a third longer. A folder has a time that changes with the names in it; while that stands still, so do they. Three
    things remain: a change within one tick of the clock, so a time is not relied on before it is old; a change further up,
    so the names are looked up every second all the same; and a path that is a link, whose file is in another folder.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder: int | None = None
        self._real = _prepare(path)
        try:
            self.db = self.connect()
            try:
                _make_fit(self.db, path)
                self.reader = apsw.Connection(self._real, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_NOFOLLOW)
            except BaseException:
                self.db.close()  # the error is kept for the next caller, and the connection with it
                raise
        except apsw.Error as error:
            raise as_down(path, error) from error
        self.reader.set_busy_timeout(1000)  # only while another process recovers the file after a crash
        self._names = path, self._real + "-wal"
        self._file, self._wal = map(_identity, self._names)
        self._known = -1  # the time of the folder when the names were right; -1: not to be relied on
        self._ask_at = 0.0
        if not os.path.islink(path):
            with suppress(OSError):  # not every system opens folders, and not every folder may be read
                self._folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_CLOEXEC)

    def connect(self) -> apsw.Connection:
        """Open another connection to write. Links were resolved, and SQLite refuses one that has taken a place since."""
        db = apsw.Connection(self._real, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW)
        try:
            db.set_busy_handler(patience())
            db.pragma("synchronous", "full")  # a commit is on the disk, not only with the kernel
            db.pragma("fullfsync", True)  # the same on macOS
        except BaseException:
            db.close()
            raise
        return db

    def check(self) -> None:
        """Raise LedgerDown if the path names another file, or none."""
        try:
            changed = -1 if self._folder is None else os.fstat(self._folder).st_ctime_ns
        except OSError:  # its disk is gone; the names will tell
            changed = -1
        now = time.monotonic()
        if changed == self._known != -1 and now < self._ask_at:
            return
        file, wal = map(_identity, self._names)
        self._wal = self._wal or wal  # the first commit makes it; it stays as long as a process has the file open
        if file is None or file != self._file or wal != self._wal:
            raise down(
                f"The ledger {self._path} was removed or replaced while it was open.",
                "what is written now would be lost, and with it the knowledge of what was done",
                "bring the file back with its -wal, or restart to begin a new ledger",
            )
        self._ask_at = now + AGAIN
        self._known = changed if 0 <= changed < time.time_ns() - SETTLED * 1e9 else -1

    def close(self) -> None:
        self.reader.close()
        self.db.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            os.close(folder)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_dev


def patience() -> Callable[[int], bool]:
    """Return a busy handler that waits for PATIENCE seconds.

    SQLite's own sleeps for up to 0.1 s, while a commit takes 0.3 ms; and without chance, processes that meet go on meeting.
    """
    give_up_at = 0.0

    def wait(tries: int) -> bool:
        nonlocal give_up_at
        now = time.monotonic()
        if tries == 0:
            give_up_at = now + PATIENCE
        time.sleep(random.uniform(0.0001, 0.001))
        return now < give_up_at

    return wait


def _prepare(path: str) -> str:
    """Make the folder and the file for their owner alone, unless they exist; return the path of the file itself.

    SQLite gives the WAL, its index and the journals the rights of the file.
    """
    if os.path.isdir(path):
        raise UsageError(f"The ledger {path} is a folder.", fix="name a file in it")
    try:
        mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:  # a system that does not tell
        mounts = []
    here = os.path.realpath(os.path.dirname(path)) + "/"
    above = [(len(point), kind) for _, point, kind, *_ in reversed(mounts) if here.startswith(point.rstrip("/") + "/")]
    kind = max(above, key=lambda mount: mount[0], default=(0, ""))[1]  # the first of equals, so the last one mounted
    if kind in REMOTE:
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
        with _creating, suppress(FileExistsError):
            os.close(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise down(f"The ledger {path} cannot be opened.", str(error), _MAY_WRITE) from error
    return real


def _make_fit(db: apsw.Connection, path: str) -> None:
    """Check whose file it is, switch it to WAL, and make the tables, unless that was done; refuse a file that is unfit."""
    # Step 1: before anything is changed. The file of another program is not ours; one without an owner may be the user's.
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

    # Step 2: WAL. Here SQLite does not ask the busy handler when another process is at it.
    wait = patience()
    for tries in count():
        try:
            mode = db.pragma("journal_mode", "wal")
            break
        except apsw.BusyError:
            if not wait(tries):
                raise
    if mode != "wal":
        raise down(f"The ledger {path} cannot use WAL.", f"SQLite stays in mode {mode!r}", "use a file on a local disk")

    # Step 3: the tables, as far as the file does not have them; another process may be faster. Those of an older version are
    # brought up to date. From then on, a process with that version of wirecall refuses its commands.
    version, clash = _version(db), ""
    if version is not None and version < len(SCHEMA):
        db.execute(SQL["begin"])
        try:
            for part in SCHEMA[_version(db) :]:
                db.execute(part)
        except apsw.SQLError as error:  # it has such a table already, or one with other columns
            clash = str(error)
        version = _version(db)
    if version is not None and version > len(SCHEMA):
        raise down(
            f"The ledger {path} was made by a newer wirecall.",
            f"its tables have version {version}, and this wirecall knows {len(SCHEMA)}",
            "upgrade wirecall",
        )
    columns = tuple(name for (name,) in db.execute(SQL["columns"]))
    if version != len(SCHEMA) or columns != Row._fields:  # to close the connection undoes what was added to them
        shown = f"wirecall_commands has the columns {', '.join(columns)}; here they are {', '.join(Row._fields)}"
        raise UsageError(
            f"The file {path} has tables with the ledger's names that are not those of this wirecall.",
            shown if columns != Row._fields else clash,
            "use the wirecall that made them, or rename them, or name another file",
        )
    if db.in_transaction:
        db.execute(SQL["commit"])


def _version(db: apsw.Connection) -> int | None:
    """Return the version of the ledger's tables in a file: 0 if it has none, None if they do not tell."""
    if not db.execute(SQL["has_ledger"]).get:
        return 0
    try:
        version = db.execute(SQL["version"]).get
    except apsw.SQLError:
        return None
    return version if isinstance(version, int) else None


def as_down(path: str, error: Exception) -> LedgerDown:
    """Put an error of SQLite in our words, as a new exception for each caller."""
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
