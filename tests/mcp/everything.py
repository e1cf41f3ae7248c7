"""`examples/everything.py` as a separate process, for clients of other projects."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from tests.ports import free_port

PROGRAM = Path(__file__).parents[2] / "examples" / "everything.py"
PATIENCE = 60.0  # seconds until it answers, and until it has exited


class Everything:
    """Serves HTTP inside a `with` block.

    Whatever happens there, the process is ended, by its id.
    """

    def __init__(self, program: Path = PROGRAM) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self._program = program
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        if (
            signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            and threading.current_thread() is threading.main_thread()
        ):
            # The default would leave the server behind.
            signal.signal(signal.SIGTERM, signal.default_int_handler)

    def __enter__(self) -> "Everything":
        command = [sys.executable, str(self._program), "--port", str(self.port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def log(self) -> str:
        """The end of what it printed."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()[-4000:].decode(errors="replace")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"{self._program.name} ended with code {self._process.returncode}:\n{self.log()}"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._program.name} did not answer within {PATIENCE:g} s:\n{self.log()}"
                )
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/healthz", timeout=PATIENCE
            ) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
