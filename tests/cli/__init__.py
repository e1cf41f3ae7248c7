"""The `wirecall` command from its user's side: a real process, or click's runner where speed
matters.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from click.testing import CliRunner, Result

from wirecall.cli import main

ROOT = Path(__file__).parents[2]
SHOP = str(ROOT / "examples" / "shop.py")
HELLO = str(ROOT / "examples" / "hello.py")
PATIENCE = 60.0


def wirecall(
    *words: str,
    stdin: bytes = b"",
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run the command in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "wirecall", *words],
        input=stdin,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )


def invoke(*words: str, input: str | bytes | None = None) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, list(words), input=input)


class Running:
    """The command while it runs. Its stderr is read as it comes."""

    def __init__(
        self,
        *words: str,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        ignored: signal.Signals | None = None,
    ) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "wirecall", *words]
        environment = {**os.environ, **(env or {})}
        # A new process ignores it too.
        before = None if ignored is None else signal.signal(ignored, signal.SIG_IGN)
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=environment
        )
        if ignored is not None:
            signal.signal(ignored, before)
        self.said: list[str] = []

    def wait_for(self, text: str) -> str:
        """Return the next line of stderr that contains a string."""
        watchdog = threading.Timer(PATIENCE, self.process.kill)
        watchdog.start()
        try:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.said.append(line)
                if text in line:
                    return line
        finally:
            watchdog.cancel()
        raise AssertionError(f"{text!r} was never said, but: {self.said}")

    def write(self, line: bytes) -> None:
        """Write a line to its stdin, which stays open."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.decode())
        self.process.stdin.flush()

    def answer(self) -> str:
        """Return the next line of stdout."""
        watchdog = threading.Timer(PATIENCE, self.process.kill)
        watchdog.start()
        try:
            assert self.process.stdout is not None
            return self.process.stdout.readline()
        finally:
            watchdog.cancel()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal; return the exit code and the rest of the output."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    def close(self) -> None:
        """End the command and the processes that it has started: a survivor would hold the pipes
        open.
        """
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.process.pid)
            for each in (tree, *tree.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        self.process.communicate()


@contextmanager
def running(
    *words: str,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    ignored: signal.Signals | None = None,
) -> Iterator[Running]:
    """Run the command in the background until the block ends."""
    run = Running(*words, cwd=cwd, env=env, ignored=ignored)
    try:
        yield run
    finally:
        run.close()


@contextmanager
def serving(target: str, *words: str) -> Iterator[str]:
    """Yield the address of a server that `wirecall serve` runs."""
    with running("serve", target, "--http", "127.0.0.1:0", *words) as run:
        yield run.wait_for("Listening on").split()[-1]
        run.end()
