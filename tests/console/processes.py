"""`wirecall serve` or `wirecall gateway run` as a process whose lines on stderr are read."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

PATIENCE = 60.0


class Running:
    """A server that runs inside a `with` block, and then ends by SIGTERM."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        # The sockets of its workers are in its own folder, and their paths have to be short.
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._lines: list[str] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "wirecall", *words],
            cwd=folder,
            env=self.environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()

    def wait_for(self, pattern: str) -> str:
        """Wait until it has printed something, and return the first group."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, "".join(self._lines))

        with self._news:
            assert self._news.wait_for(lambda: found() is not None, PATIENCE), self._lines
            match = found()
        assert match is not None
        return match[1]

    def call(self, method: str, **params: Any) -> Any:
        """Make one call over HTTP."""
        url = self.wait_for(r"Listening on (\S+)")
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        request = urllib.request.Request(
            f"{url}/rpc", json.dumps(message).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    def scrape(self) -> str:
        """Return what `/metrics` answers."""
        url = self.wait_for(r"Metrics: (\S+)")
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return str(answer.read().decode())

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()
