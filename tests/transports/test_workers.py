"""Workers that crash are replaced; workers that cannot start end the server."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 60.0

SCRIPT = """
import os, signal, sys
from pathlib import Path
from wirecall.transports import workers

workers.SHORTEST, workers.LONGEST, workers.QUIET = 0.001, 0.006, float(sys.argv[2])

def crash(serving, orders):
    serving()
    os.abort()

def fail(serving, orders):
    os._exit(3)

def fail_later(serving, orders):
    try:
        os.mkdir(sys.argv[3])
    except FileExistsError:
        os._exit(3)
    serving()
    os.abort()

def stop(serving, orders):
    raise AssertionError("the signal was lost")

if sys.argv[1] == "stop":
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))

workers.Workers(globals()[sys.argv[1]], 1, 1.0, lambda: print("serving", flush=True)).run()
"""


@contextmanager
def supervised(work: str, quiet: float, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SCRIPT, work, str(quiet), *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def delays(process: "subprocess.Popen[str]", count: int) -> list[float]:
    """Return the delays before the first restarts."""
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(count)]
    return [float(re.findall(r"starts in (\S+) s", line)[0]) for line in lines]


def test_worker_that_crashes_repeatedly_is_replaced_with_growing_delays() -> None:
    with supervised("crash", 1000.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        assert delays(process, 6) == [0.001, 0.002, 0.004, 0.006, 0.006, 0.006]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 0


def test_delay_of_a_restart_is_short_again_after_a_quiet_time() -> None:
    with supervised("crash", 0.0) as process:
        assert delays(process, 4) == [0.001] * 4


def test_workers_that_never_served_end_the_server() -> None:
    with supervised("fail", 1000.0) as process:
        printed, logged = process.communicate(timeout=PATIENCE)
        assert (process.returncode, printed) == (1, "")
        assert "a worker ended before it could serve" in logged


def test_worker_that_cannot_restart_is_retried(tmp_path: Path) -> None:
    """Perhaps its ledger is away for a moment."""
    with supervised("fail_later", 1000.0, f"{tmp_path}/once") as process:
        assert delays(process, 4) == [0.001, 0.002, 0.004, 0.006]


def test_worker_ends_at_a_signal_that_comes_before_its_first_line() -> None:
    with supervised("stop", 1000.0) as process:
        _, logged = process.communicate(timeout=PATIENCE)
        assert "the signal was lost" not in logged
        assert "a worker ended before it could serve" in logged
