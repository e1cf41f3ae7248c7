"""The paths of files that other users must neither read nor replace: the ledger, the audit trail and logins."""

import errno
import os
import stat
from pathlib import Path

from wirecall.errors import UsageError

MAX_LINKS = 40  # as Linux has it


def login_folder() -> Path:
    """Return the folder of the user's logins, in the folder of the user's data (XDG Base Directory specification)."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share", "wirecall", "logins")


def real_path(path: str | os.PathLike[str], what: str) -> str:
    """Resolve the symbolic links in `path`; refuse one in a folder that other users can write.

    Another user could have made such a link, or could replace it, and so choose the file that is read and written. This
    holds in a folder with the sticky bit too, such as /tmp: there, the link may have been made before ours.
    """
    here = Path(os.path.abspath(path))
    for _ in range(MAX_LINKS + 1):
        # Links are followed one by one, from the root on, because each is judged by the folder that it is in.
        link = next((each for each in (*reversed(here.parents), here) if os.path.islink(each)), None)
        if link is None:
            return os.path.normpath(here)  # a ".." comes from a link, and can be dropped now that none is left
        folder, target = link.parent, os.readlink(link)
        mode = stat.S_IMODE(os.stat(folder).st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UsageError(
                f"{what} {os.fspath(path)} is behind a symbolic link that other users can replace.",
                f"expected no link in a folder that others can write, got {link} in {folder} (mode {mode:o})",
                f"name the file itself ({folder / target}), or take the right to write: chmod go-w {folder}",
            )
        here = folder / target / here.relative_to(link)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
