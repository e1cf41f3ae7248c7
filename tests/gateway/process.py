"""`wirecall gateway run` as a separate process."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.ports import free_port

PATIENCE = 60.0  # seconds until it answers, and until it has exited


def settings(upstreams: Mapping[str, Mapping[str, Any]], **gateway: Any) -> str:
    """Return `wirecall.toml` for a gateway in front of these servers."""
    lines = ["[gateway]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in gateway.items()]
    for upstream, options in upstreams.items():
        lines.append(f"[upstream.{upstream}]")
        for name, value in options.items():
            text = json.dumps(value)
            if isinstance(value, Mapping):
                members = [f"{key} = {json.dumps(each)}" for key, each in value.items()]
                text = f"{{ {', '.join(members)} }}"
            lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"


class GatewayProcess:
    """Serves inside a `with` block. Whatever happens there, the process is ended, by its id."""

    def __init__(
        self, folder: Path, upstreams: Mapping[str, Mapping[str, Any]], **gateway: Any
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir(exist_ok=True)
        stated = {"ledger": "sqlite:gateway.db", **gateway}
        (folder / "wirecall.toml").write_text(settings(upstreams, **stated))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        command = [sys.executable, "-m", "wirecall", "gateway", "run"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--http", f"127.0.0.1:{self.port}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ},
            )
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise RuntimeError(f"the gateway does not answer:\n{self.log()}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=PATIENCE) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def status(self) -> dict[str, Any]:
        """Return what `/status` says of the upstreams."""
        with urllib.request.urlopen(f"{self.url}/status", timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.loads(answer.read())["upstreams"]
            return found

    def log(self) -> str:
        """The end of what it printed."""
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """End it without a word."""
        self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> "GatewayProcess":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
