"""The file of an SQLite ledger.

It has its statements; it says how the file is opened and why it may be refused; and it puts the
errors of SQLite in our words.
"""

import copy
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote

import apsw

from wirecall.errors import UsageError
from wirecall.files import real_path
from wirecall.ledger.base import Delivery, LedgerDown, Schema, Tables, other_tables
from wirecall.logs import logger

# Seconds that a write waits for the lock of the file.
PATIENCE = 5.0
APPLICATION_ID = int.from_bytes(b"wcll", "big")

# WAL needs memory that all users of the file share, so they must live under one kernel.
REMOTE = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "afs",
    "ceph",
    "glusterfs",
    "lustre",
    "fuse.sshfs",
    "fuse.glusterfs",
}

# Seconds that a folder must be unchanged before its time is trusted, and seconds that it is trusted
# then.
SETTLED = 1.0
AGAIN = 1.0

_creating = threading.Lock()


class Replaced(LedgerDown):
    """The path of an open file names another one, or none."""


class Row(NamedTuple):
    """A row of wirecall_commands: the columns that this wirecall knows, in their order."""

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
    params: bytes | None = None
    may_rerun: int | None = None


_text = (
    Path(__file__)
    .with_name("sqlite.sql")
    .read_text(encoding="utf-8")
    .replace("{columns}", ", ".join(Row._fields))
    .replace("{c.columns}", ", ".join(f"c.{name}" for name in Row._fields))
)
SQL = {
    name: text.strip()
    for name, _, text in (part.partition("\n") for part in _text.split("-- name: ")[1:])
}
# Each makes a version of the tables.
SCHEMA = [text for name, text in SQL.items() if name.startswith("schema ")]


class LedgerFile:
    """An open ledger: a connection that writes, one that reads, and a check of the path.

    Writes to a file that was removed or replaced would be lost, so `check` comes before every
    commit. Looking up both names each time is slow: Linux gives a file whose times were just read a
    finer time with its next write, and a commit then takes a third longer. A folder has a time that
    changes with the names in it; while it is the same, so are they. Three things remain: a change
    within one tick of the clock, so a time is not trusted before it is old; a change further up, so
    the names are still looked up every second; and a path that is a link, whose file is in another
    folder.
    """

    def __init__(self, path: str, tables: Tables = "create") -> None:
        self._path = path
        self._folder: int | None = None
        if tables in ("leave", "read") and not os.path.exists(path):
            raise other_tables(_no_file(path))
        self._real = _prepare(path)
        try:
            if tables == "read":
                self.db = _connect_to_read(self._real)
            else:
                self.db = self.connect()
            try:
                _check_tables(self.db, path, tables)
                if tables != "read":
                    _make_fit(self.db, path)
                self.reader = _connect_to_read(self._real)
            except BaseException:
                self.db.close()  # the error is kept for the next caller, and the connection with it
                raise
        except apsw.Error as error:
            raise as_down(path, error) from error
        # Only while another process recovers the file after a crash.
        self.reader.set_busy_timeout(1000)
        self._names = path, self._real + "-wal"
        self._file, self._wal = map(_identity, self._names)
        # The time of the folder when the names were right. -1: it is not trusted.
        self._known = -1
        self._ask_at = 0.0
        if not os.path.islink(path):
            # Not every system opens folders, and not every folder may be read.
            with suppress(OSError):
                self._folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_CLOEXEC)

    def connect(self) -> apsw.Connection:
        """Open another connection to write.

        Links were resolved, and SQLite refuses a link that was made since.
        """
        db = apsw.Connection(
            self._real, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW
        )
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
        changed = self._folder_time()
        now = time.monotonic()
        if changed == self._known != -1 and now < self._ask_at:
            return
        file, wal = map(_identity, self._names)
        # The first commit makes it; it stays as long as a process has the file open.
        self._wal = self._wal or wal
        if file is None or file != self._file or wal != self._wal:
            raise self._replaced()
        self._ask_at = now + AGAIN
        self._known = -1
        if 0 <= changed < time.time_ns() - SETTLED * 1e9:
            self._known = changed

    def identify(self) -> str:
        """Return what distinguishes the file from its copies.

        Raise `Replaced` if the path names another one. Any thread may call it.
        """
        if _identity(self._path) != self._file or self._file is None:
            raise self._replaced()
        file, device = self._file
        return f"{device}:{file}"

    def _replaced(self) -> "Replaced":
        error = down(
            f"The ledger {self._path} was removed or replaced while it was open.",
            "what is written now would be lost, and with it the knowledge of what was done",
            "bring the file back with its -wal, or restart to begin a new ledger",
        )
        return Replaced(str(error))

    def _folder_time(self) -> int:
        """Return the time of the last change of the folder in nanoseconds, or -1."""
        if self._folder is None:
            return -1
        try:
            return os.fstat(self._folder).st_ctime_ns
        except OSError:  # its disk is gone; the names will show it
            return -1

    def close(self) -> None:
        self.reader.close()
        self.db.close()
        folder = self._folder
        self._folder = None
        if folder is not None:
            os.close(folder)


def _connect_to_read(real: str) -> apsw.Connection:
    """Open a connection that only reads.

    Even that makes files beside one with a WAL. If the folder refuses them and there is no WAL, no
    process writes, so the file counts as immutable: it may be a copy on a disk that is only read.
    """
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_NOFOLLOW
    if os.access(os.path.dirname(real), os.W_OK) or os.path.exists(f"{real}-wal"):
        return apsw.Connection(real, flags=flags)
    uri = f"file:{quote(real)}?immutable=1"
    return apsw.Connection(uri, flags=flags | apsw.SQLITE_OPEN_URI)


def _no_file(path: str) -> Schema:
    return Schema(f"The ledger {path} does not exist: it", 0, len(SCHEMA), steps=tuple(SCHEMA))


def schema_of(path: str) -> Schema:
    """Return the version of the tables in a file. Nothing is changed, and no file is made."""
    path = os.path.abspath(path)
    if not os.path.exists(path):
        return _no_file(path)
    try:
        with closing(_connect_to_read(_prepare(path))) as db:
            db.set_busy_timeout(1000)
            schema = _schema(db, path)
    except apsw.Error as error:
        raise as_down(path, error) from error
    if schema is None:
        raise _unreadable(path)
    return schema


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_dev


def patience() -> Callable[[int], bool]:
    """Return a busy handler that waits for PATIENCE seconds.

    SQLite's own sleeps for up to 0.1 s, while a commit takes 0.3 ms; and without random times,
    processes that collide keep colliding.
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
    """Make the folder and the file for their owner alone, unless they exist.

    Return the path of the file itself. SQLite gives the WAL, its index and the journals the rights
    of the file.
    """
    if os.path.isdir(path):
        raise UsageError(f"The ledger {path} is a folder.", fix="name a file in it")
    try:
        mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:  # a system that does not list them
        mounts = []
    here = os.path.realpath(os.path.dirname(path)) + "/"
    above = [
        (len(point), kind)
        for _, point, kind, *_ in reversed(mounts)
        if here.startswith(point.rstrip("/") + "/")
    ]
    # The first of equals, so the last one mounted.
    kind = max(above, key=lambda mount: mount[0], default=(0, ""))[1]
    if kind in REMOTE:
        raise down(
            f"The ledger {path} is on a network file system ({kind}).",
            "SQLite's locks and shared memory do not reach other hosts",
            "use a local disk, or a ledger in PostgreSQL or Redis",
        )
    try:
        real = real_path(path, "The ledger")
        _make_folder(path, os.path.dirname(real))
        # Closing a file drops all locks that this process has on it. So only a new file is touched
        # here, and no other thread connects to it before it is closed again.
        with _creating, suppress(FileExistsError):
            os.close(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise down(f"The ledger {path} cannot be opened.", str(error), _MAY_WRITE) from error
    return real


def _check_tables(db: apsw.Connection, path: str, tables: Tables) -> None:
    """Refuse a file whose tables would have to change, if the caller must not change them."""
    schema = _schema(db, path)
    if schema is None and tables == "read":
        raise _unreadable(path)
    if schema is not None:  # else `_make_fit` finds the fault
        schema.check(tables)


def _make_folder(path: str, folder: str) -> None:
    """Make the folder of a ledger.

    A mistyped path must not become a tree of folders with an empty ledger in it.
    """
    above = os.path.dirname(folder)
    if not os.path.isdir(above):
        raise UsageError(
            f"The ledger {path} has no place.",
            f"the folder {above} does not exist; only the last folder of a path is made",
            f"correct the path, or make the folder: mkdir -p {folder}",
        )
    with suppress(FileExistsError):
        os.mkdir(folder, mode=0o700)


def _make_fit(db: apsw.Connection, path: str) -> None:
    """Make a file a ledger, unless it is one; refuse a file that is unfit."""
    _check_owner(db, path)
    _use_wal(db, path)
    _make_tables(db, path)


def _check_owner(db: apsw.Connection, path: str) -> None:
    """Refuse a file that is read-only, or another program's; mark an empty one as ours.

    Nothing is changed before. The file of another program is not ours; one without an owner may be
    the user's.
    """
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
    """Switch the file to WAL."""
    # SQLite does not ask the busy handler here while another process does the same.
    wait = patience()
    for tries in count():
        try:
            mode = db.pragma("journal_mode", "wal")
            break
        except apsw.BusyError:
            if not wait(tries):
                raise
    if mode != "wal":
        raise down(
            f"The ledger {path} cannot use WAL.",
            f"SQLite stays in mode {mode!r}",
            "use a file on a local disk",
        )


def _make_tables(db: apsw.Connection, path: str) -> None:
    """Make the tables that the file does not have; another process may be faster.

    Tables of an older version are brought up to date.
    """
    schema = _schema(db, path)
    clash = ""
    if schema is not None and schema.is_behind:
        db.execute(SQL["begin"])
        try:
            clash = _update(db, path)
        except BaseException:
            db.execute(SQL["rollback"])
            raise
        schema = _schema(db, path)
    columns = tuple(name for (name,) in db.execute(SQL["columns"]))
    faults = [clash]
    is_ours = columns[: len(Row._fields)] == Row._fields
    if not is_ours:
        faults.append(
            f"wirecall_commands has the columns {', '.join(columns)}; "
            f"here they are {', '.join(Row._fields)}"
        )
    # Closing the connection rolls back the additions.
    if schema is None or schema.is_behind or not is_ours:
        raise _unreadable(path, "; ".join(filter(None, faults)))
    if db.in_transaction:
        db.execute(SQL["commit"])


def _update(db: apsw.Connection, path: str) -> str:
    """Execute the missing parts of the schema; return why that is impossible, if it is."""
    schema = _schema(db, path)
    if schema is None:
        return ""
    if schema.is_behind and schema.found:
        logger.warning(
            "the ledger's tables are brought from version %s to %s", schema.found, schema.known
        )
    try:
        for part in schema.steps:
            db.execute(part)
    except apsw.SQLError as error:  # it has such a table already, or one with other columns
        return str(error)
    return ""


def _unreadable(path: str, why: str = "") -> UsageError:
    return UsageError(
        f"The file {path} has tables with the ledger's names that are not those of this wirecall.",
        why,
        "use the wirecall that made them, or rename them, or name another file",
    )


def _schema(db: apsw.Connection, path: str) -> Schema | None:
    """Return the version of the ledger's tables in a file. None: it cannot be read."""
    where = f"The ledger {path}"
    if not db.execute(SQL["has_ledger"]).get:
        return Schema(where, 0, len(SCHEMA), steps=tuple(SCHEMA))
    try:
        least = db.execute(SQL["least"]).get
        found = least
        if db.execute(SQL["has_level"]).get:
            found = db.execute(SQL["level"]).get
    except apsw.SQLError:
        return None
    if not isinstance(least, int) or not isinstance(found, int):
        return None
    return Schema(where, found, len(SCHEMA), least, tuple(SCHEMA[found:]))


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
    (
        apsw.FullError,
        "has no room left",
        "free space on its disk; the ledger then continues without a restart",
    ),
    (
        apsw.BusyError,
        f"was locked for more than {PATIENCE:g} s",
        "find the process, or the handler in a transaction, that holds it; "
        "the ledger then continues without a restart",
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
