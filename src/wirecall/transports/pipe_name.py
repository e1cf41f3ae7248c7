"""The name of a pipe on stdio.

It names the process at the other end, and the place of this server among those of that process. The
ledger compares calls without a key by the name of their sender. So the name of a pipe has these
properties:

1. Two clients, such as two windows of an editor, have two names: neither waits for the calls of the
   other.
2. A server that its client has started again has the name of the one before, and recognises the
   calls that were lost.
3. Servers that one client runs side by side have different places. A place is the address of a
   socket that the kernel frees when its process ends (on Linux).

A launcher between the client and the server (`sh`, `uvx`) inherits the read end. So the client is
the ancestor that holds the write end. If the system does not show that, the parent counts as the
client.
"""

import atexit
import errno
import os
import socket
import stat
import struct
import sys
from hashlib import sha256
from pathlib import Path

PROC = Path("/proc")
# Ancestors that may be launchers.
MOST_ANCESTORS = 32
# Servers of one client at the same time.
MOST_PLACES = 256


def pipe_name(descriptor: int, *shared: str) -> str:
    """Return the name of the pipe that a descriptor reads.

    Servers that share calls have equal `shared`.
    """
    client = _process(_client_of(descriptor))
    place = _take_place("\0".join((client, *shared)))
    if place is None:
        return f"pipe of {client}, {this_process()}"
    return f"pipe of {client}, place {place}"


def this_process() -> str:
    """Return the name of this process, which no other process has."""
    return _process(os.getpid())


def _process(pid: int) -> str:
    """Return the name of a process.

    Pids alone are reused, and each host and container has its own.
    """
    started = _stat(pid)[19:20]
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return " ".join((socket.gethostname(), boot, str(pid), *started))


def _stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on (proc_pid_stat(5), field 3), if any."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


# --- the process at the other end -----------------------------------------------------------------


def _client_of(descriptor: int) -> int:
    """Return the process at the other end of a pipe or a pair of sockets."""
    try:
        end = os.fstat(descriptor)
        if stat.S_ISSOCK(end.st_mode):
            return _maker_of(descriptor) or os.getppid()
    except OSError:  # it is closed
        return os.getppid()
    pid = os.getppid()
    for _ in range(MOST_ANCESTORS):
        if _writes(pid, f"pipe:[{end.st_ino}]"):
            return pid
        parent = _stat(pid)[1:2]
        if parent in ([], ["0"]):
            break
        pid = int(parent[0])
    return os.getppid()


def _maker_of(descriptor: int) -> int:
    """Return the process that made a pair of sockets; 0 if the system does not show it."""
    if sys.platform != "linux":
        return 0
    with socket.socket(fileno=os.dup(descriptor)) as end:
        pid: int = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid


def _writes(pid: int, pipe: str) -> bool:
    """Return whether a process holds the write end of a pipe."""
    folder = PROC / str(pid) / "fd"
    try:
        return any(
            os.readlink(folder / name) == pipe and _is_writable(pid, name)
            for name in os.listdir(folder)
        )
    except OSError:  # it belongs to another user, or has ended
        return False


def _is_writable(pid: int, name: str) -> bool:
    for line in (PROC / str(pid) / "fdinfo" / name).read_text().splitlines():
        label, _, value = line.partition(":")
        if label == "flags":
            return int(value, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


# --- the place of this server ---------------------------------------------------------------------


def _take_place(group: str) -> int | None:
    """Take the first free place in a group of servers, until this process ends.

    Return None if all of them are taken.
    """
    if sys.platform != "linux":
        return 0  # servers that one client runs side by side share a name there
    name = sha256(group.encode(errors="surrogatepass")).hexdigest()[:32]
    for place in range(MOST_PLACES):
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0wirecall-{name}-{place}")
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                return None
        else:
            atexit.register(held.close)  # keeps the socket until then
            return place
    return None
