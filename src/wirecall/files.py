"""The paths and locks of files that other users must not read or replace.

These are the ledger, the audit trail and the logins.

Windows does not have locks on descriptors, or an event loop that watches pipes. `IS_PORTABLE`
selects the parts that every system has: `TransactionLock` instead of `DescriptorLock`, and threads
that read and write (`transports.lines`). Code that uses it takes `portable=`, so that tests run
both.
"""

import errno
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from wirecall.errors import UsageError

if TYPE_CHECKING:
    import sqlite3

IS_PORTABLE = sys.platform == "win32"
# The limit of Linux.
MAX_LINKS = 40


def login_folder() -> Path:
    """Return the folder of the user's logins.

    It is in the folder of the user's data (XDG Base Directory specification).
    """
    return Path(
        os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share", "wirecall", "logins"
    )


def real_path(path: str | os.PathLike[str], what: str) -> str:
    """Resolve the symbolic links in `path`; refuse one in a folder that other users can write to.

    Another user could have made such a link, or could replace it, and so choose the file that is
    read and written. This also applies to a folder with the sticky bit, such as /tmp: another user
    may have made the link first.
    """
    here = Path(os.path.abspath(path))
    for _ in range(MAX_LINKS + 1):
        # Follow links one by one from the root, because the folder of each decides whether it is
        # safe.
        link = next(
            (each for each in (*reversed(here.parents), here) if os.path.islink(each)), None
        )
        if link is None:
            # A ".." comes from a link; without links it can be dropped.
            return os.path.normpath(here)
        folder = link.parent
        target = os.readlink(link)
        mode = stat.S_IMODE(os.stat(folder).st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UsageError(
                f"{what} {os.fspath(path)} is behind a symbolic link that other users can replace.",
                "expected no link in a folder that others can write, "
                f"got {link} in {folder} (mode {mode:o})",
                f"name the file itself ({folder / target}), "
                f"or remove the write permission: chmod go-w {folder}",
            )
        here = folder / target / here.relative_to(link)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))


def replace_file(path: Path, data: bytes, *, like: Path | None = None) -> None:
    """Write a temporary file and rename it, so that the file is complete at any moment.

    Only its owner can read it, unless it takes the permissions of another file, `like`.
    """
    import shutil  # late: few programs write such a file
    import tempfile

    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 0600
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        if like is not None and like.exists():
            shutil.copymode(like, made)
        os.replace(made, path)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise


def create_file(path: Path, data: bytes) -> bool:
    """Write a file that is not there yet; return False if there is one. Only its owner can read it.

    Of several processes that create it at the same time, one succeeds. The others find its file
    complete.
    """
    import tempfile  # late: few programs write such a file

    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 0600
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        try:
            os.link(made, path)
        except FileExistsError:
            return False
        except OSError:  # this file system has no links: the last one that is written stays
            os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
    return True


class Lock(Protocol):
    """A lock on a file, which one process holds at a time. A process that exits releases it."""

    def take(self, file: int) -> bool:
        """Take the lock, unless another process has it; return whether it was taken."""

    def give_back(self, file: int) -> None: ...

    def close(self) -> None: ...


class DescriptorLock:
    """A lock on an open file (flock)."""

    def take(self, file: int) -> bool:
        import fcntl  # late: Windows does not have it

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give_back(self, file: int) -> None:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)

    def close(self) -> None:
        pass


class TransactionLock:
    """A lock for all systems: an SQLite transaction in a separate file, which stays empty."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = f"{os.fspath(path)}.lock"
        self._database: sqlite3.Connection | None = None

    def take(self, file: int) -> bool:
        import sqlite3  # late: only this kind of lock needs it

        if self._database is None:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            self._database = sqlite3.connect(
                self._path, timeout=0, isolation_level=None, check_same_thread=False
            )
        try:
            self._database.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                return False
            raise
        return True

    def give_back(self, file: int) -> None:
        assert self._database is not None
        self._database.execute("ROLLBACK")

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
