"""`wirecall dev`: serve, and restart when a file changes.

This process watches; the server is its child, `wirecall serve --log text`. A child that ends by itself (a syntax error, a
port in use) has printed the reason; the next change starts another. Files are polled several times a second: for a few
hundred files that costs less than file system events, and works on every file system.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import click

from wirecall.cli.failures import CliError, Exit
from wirecall.cli.serve import ADDRESS, named, serving
from wirecall.cli.settings import ledger_option
from wirecall.cli.targets import Target, optional_target_argument

PAUSE = 0.25  # seconds between two polls
GRACE = 3.0  # seconds for the calls in flight when the server restarts
MOST = 5000  # files that are watched
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


@click.command("dev")
@optional_target_argument
@click.option("--http", metavar="HOST:PORT", help=f"Address to listen on. [default: {ADDRESS}]")
@ledger_option
def command(target: Target | None, http: str | None, ledger: str | None) -> int:
    """Serve the app in TARGET with a line per call, and restart when a Python file beside it changes.

    \b
    wirecall dev shop.py
    """
    how = serving({"http": http, "ledger": ledger})
    target = target or named(how)
    if target.kind != "file" or not Path(target.text).is_file():
        target.app()  # raises the error that explains the target
    name = f"{target.text}:{target.name}" if target.name else target.text
    words = [sys.executable, "-m", "wirecall", "serve", name, "--http", how.http, "--log", "text", "--grace", f"{GRACE:g}s"]
    words += ["--ledger", how.ledger] if how.ledger else []
    return _Watched(words, str(Path(target.text).resolve().parent)).run()


class _Watched:
    """A server process, and the files of its app."""

    def __init__(self, words: list[str], folder: str) -> None:
        self._words = words
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        def stop(*_: object) -> None:
            if self._stopping:  # the second Ctrl-C
                if self._child is not None:
                    self._child.kill()
                os._exit(Exit.INTERRUPTED)
            self._stopping = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        seen = dict(islice(_python_files(self._folder), MOST))
        self._start()
        try:
            while not self._stopping:
                time.sleep(PAUSE)
                if self._child is not None and self._child.poll() is not None and not self._stopping:
                    self._child = None
                    _say("the server has ended; it restarts when a file changes")
                now = dict(islice(_python_files(self._folder), MOST))
                if now != seen:
                    seen = now
                    _say("a file changed, restarting")
                    self._end()
                    self._start()
        finally:
            self._end()
        return Exit.DONE

    def _start(self) -> None:
        try:
            # A session of its own: this process passes Ctrl-C on. No byte code: Python judges it by second and size, so a
            # quick edit of equal length would start the old source.
            environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
            self._child = subprocess.Popen(self._words, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        except OSError as error:
            raise CliError("The server cannot be started.", str(error), exit=Exit.UNREACHABLE) from error

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


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def _python_files(folder: str) -> Iterator[tuple[str, int]]:
    """Yield Python files in a folder and below with the times of their last change, without hidden and installed ones."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # deleted meanwhile, or not readable
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
