"""A terminal at which a test types."""

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.cli import PATIENCE


def watched(folder: Path, *words: str, until: str, then: Callable[[], object]) -> tuple[int, str]:
    """Run the command on a terminal, and do something when it first shows this."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "200"}
    command = [sys.executable, "-m", "wirecall", *words]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        is_done = False
        watchdog = threading.Timer(PATIENCE, process.kill)
        watchdog.start()
        while True:
            try:
                shown += os.read(ours, 65_536)
            except OSError:  # the command has ended
                break
            if not is_done and until.encode() in shown:
                is_done = True
                then()
        process.wait()
        watchdog.cancel()
    os.close(ours)
    return process.returncode, shown.decode()


def typed(folder: Path, *words: str, lines: list[str]) -> tuple[int, str]:
    """Run the command on a terminal, and type a line at each prompt."""
    ours, theirs = pty.openpty()
    environment = {
        **os.environ,
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONIOENCODING": "utf-8",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "wirecall", *words]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        prompts = 0
        watchdog = threading.Timer(PATIENCE, process.kill)
        watchdog.start()
        while True:
            try:
                data = os.read(ours, 65_536)
            except OSError:  # the command has ended
                break
            shown += data
            while shown.count(b"): ") > prompts and lines:
                prompts += 1
                os.write(ours, lines.pop(0).encode())
        process.wait()
        watchdog.cancel()
    os.close(ours)
    return process.returncode, shown.decode().replace("\r\n", "\n")
