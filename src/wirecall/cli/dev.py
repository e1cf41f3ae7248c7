"""`wirecall dev`: serve, and start anew when a file changes.

This process watches; the server is a child of it, `wirecall serve --log text`. A child that ends by itself (a syntax error,
a port that is taken) has told why; the next change starts another. Files are looked at several times a second: a few
hundred of them cost less than any way to be told of changes, and work on every file system.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from wirecall.cli.failures import Exit, Failure
from wirecall.cli.serve import ADDRESS, named, serving
from wirecall.cli.settings import ledger_option
from wirecall.cli.targets import Target, target_argument

PAUSE = 0.25  # seconds between two looks
GRACE = 3.0  # seconds a server has to finish before it is replaced
MOST = 5000  # files that are watched
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


@click.command("dev")
@target_argument(required=False)
@click.option("--http", metavar="HOST:PORT", help=f"Address to listen on. [default: {ADDRESS}]")
@ledger_option
def command(target: Target | None, http: str | None, ledger: str | None) -> int:
    """Serve the app in TARGET with a line per call, and start anew when a Python file beside it changes.

    \b
    wirecall dev shop.py
    """
    how = serving({"http": http, "ledger": ledger})
    target = target or named(how)
    if target.kind != "file" or not Path(target.text).is_file():
        target.app()  # which tells what is wrong with it
    name = f"{target.text}:{target.name}" if target.name else target.text
    words = [sys.executable, "-m", "wirecall", "serve", name, "--http", how.http, "--log", "text", "--grace", f"{GRACE:g}s"]
    words += ["--ledger", how.ledger] if how.ledger else []
    return _Watched(words, Path(target.text).resolve().parent).run()


class _Watched:
    """A server, and the files it is made of."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self._words = words
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        seen = self._times()
        self._start()
        try:
            while not self._stopping:
                time.sleep(PAUSE)
                self._look_after()
                now = self._times()
                if now != seen:
                    seen = now
                    self._say("changed, starting anew")
                    self._end()
                    self._start()
        finally:
            self._end()
        return Exit.DONE

    def _stop(self, *_: Any) -> None:
        if self._stopping:  # the second Ctrl-C
            if self._child is not None:
                self._child.kill()
            os._exit(Exit.INTERRUPTED)
        self._stopping = True

    def _start(self) -> None:
        try:
            # A group of its own: Ctrl-C is for this process to pass on.
            self._child = subprocess.Popen(self._words, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise Failure("The server cannot be started.", str(error), "", exit=Exit.UNREACHABLE) from error

    def _look_after(self) -> None:
        if self._child is not None and self._child.poll() is not None and not self._stopping:
            self._child = None
            self._say("the server has ended; it starts anew when a file changes")

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(GRACE + 2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def _times(self) -> dict[str, int]:
        """When each file was changed last."""
        return {path: changed for _, (path, changed) in zip(range(MOST), _python_files(str(self._folder)), strict=False)}

    @staticmethod
    def _say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def _python_files(folder: str) -> Iterator[tuple[str, int]]:
    """Python files in a folder and below, but not in hidden and installed ones."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # gone meanwhile, or not ours to read
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _SKIPPED:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                if not os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                    yield from _python_files(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path, entry.stat().st_mtime_ns
        except OSError:
            continue
