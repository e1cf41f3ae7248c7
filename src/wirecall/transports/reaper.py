"""A small process that ends our children if this process is killed.

A process that is killed cannot end its children, and a child may ignore the end of its stdin. The
reaper reads a pipe whose other end is in this process. When that end is closed, the reaper ends the
process groups that it watches: SIGTERM, and SIGKILL after `GRACE` seconds.

1. The pipe carries lines: `+PID` watches a group, `-PID` forgets it. A group that has ended is
   forgotten before its number can belong to another process.
2. The reaper leads its own session, so a signal of the terminal does not reach it.
3. It imports as little as possible: it starts beside the first child, and no call waits for it.
"""

import asyncio
import contextlib
import os
import sys

# Seconds between SIGTERM and SIGKILL.
GRACE = 2.0

_SCRIPT = f"""
import os, signal, sys, time
watched = set()
for line in sys.stdin:
    if line[0] == "+":
        watched.add(int(line[1:]))
    else:
        watched.discard(int(line[1:]))
def end(number):
    for group in list(watched):
        try:
            os.killpg(group, number)
        except OSError:
            watched.discard(group)
end(signal.SIGTERM)
until = time.monotonic() + {GRACE}
while watched and time.monotonic() < until:
    time.sleep(0.02)
    end(0)
end(signal.SIGKILL)
"""


class Reaper:
    """Watches the process groups of our children."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._opening = asyncio.Lock()
        # Windows has no process groups.
        self._is_useful = hasattr(os, "killpg")

    async def open(self) -> None:
        """Start the process, unless it runs. It is started again if it was killed."""
        if not self._is_useful:
            return
        async with self._opening:
            if self._process is not None and self._process.returncode is None:
                return
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                "-c",
                _SCRIPT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )

    def watch(self, pid: int) -> None:
        """End the group of this process if we are killed."""
        self._write(b"+%d\n" % pid)

    def forget(self, pid: int) -> None:
        """Do nothing about this group any more: it has ended."""
        self._write(b"-%d\n" % pid)

    def _write(self, line: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError, RuntimeError):  # it was killed
            self._process.stdin.write(line)

    async def aclose(self) -> None:
        """End the process. The groups that it still watches end with it."""
        process = self._process
        self._process = None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        await process.wait()
