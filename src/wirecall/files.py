"""The paths of files that other users must neither read nor replace: the ledger and the audit trail."""

import errno
import os
import stat
from collections import deque

from wirecall.errors import UsageError

MAX_LINKS = 40  # as Linux has it


def real_path(path: str | os.PathLike[str], what: str) -> str:
    """Resolve the symbolic links in `path`; refuse one in a folder that other users can write.

    Another user could have made such a link, or could replace it, and so choose the file that is read and written. This
    holds in a folder with the sticky bit too, such as /tmp: there, the link may have been made before ours.
    """
    here, names, links = "/", deque(os.path.abspath(path).split("/")), 0
    while names:
        name = names.popleft()
        if name in ("", "."):
            continue
        if name == "..":
            here = os.path.dirname(here)
            continue
        step = os.path.join(here, name)
        try:
            target = os.readlink(step)
        except OSError:  # it is not a link, or it does not exist yet
            here = step
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        mode = stat.S_IMODE(os.stat(here).st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UsageError(
                f"{what} {os.fspath(path)} is behind a symbolic link that other users can replace.",
                f"expected no link in a folder that others can write, got {step} in {here} (mode {mode:o})",
                f"name the file itself ({os.path.join(here, target)}), or take the right to write: chmod go-w {here}",
            )
        here = "/" if target.startswith("/") else here
        names.extendleft(reversed(target.split("/")))
    return here
