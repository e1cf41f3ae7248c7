"""Several workers: copies of this process (fork), each with a listening socket of its own on the same address.

1. The parent does not serve. It passes signals on, and replaces a worker that ended.
2. A worker that crashes while it serves is replaced, however often: one bad call must not end the server. Each crash doubles
   the delay before the next start, up to `LONGEST`; a life of `QUIET` seconds brings the delay back to `SHORTEST`.
3. If the first workers end before they serve, the app cannot start: the parent gives up.
4. The workers use the grace time themselves. The parent kills the ones that are left a second later.
"""

import contextlib
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wirecall.errors import StartFailed, UsageError
from wirecall.logs import logger

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds before a worker that crashed is replaced, at least and at most. The others take the connections meanwhile.
SHORTEST, LONGEST = 0.1, 10.0
QUIET = 60.0

Work = Callable[[Callable[[], None]], None]


class Worker:
    """One worker and its successors."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None
        self.word: Connection | None = None  # readable when the worker serves
        self.since = self.due = 0.0  # when the process started; when the next one is to start
        self.crashes = 0  # in a row


class Workers:
    """Runs `work` in `count` processes until a signal. `work` gets a function to call once it serves."""

    def __init__(self, work: Work, count: int, grace: float, serving: Callable[[], None]) -> None:
        from multiprocessing import get_all_start_methods, get_context

        if "fork" not in get_all_start_methods():
            raise UsageError(f"workers={count} is not possible.", "several workers need fork", "use workers=1")
        self._context: Any = get_context("fork")
        self._work = work
        self._grace = grace
        self._serving = serving  # called once, when all workers serve
        self._stopping = False
        self._workers = [Worker() for _ in range(count)]

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; StartFailed if the app cannot start."""
        before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        try:
            failed = self._watch()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        if failed:
            raise StartFailed("a worker ended before it could serve; its own message is above")

    def _ask(self, *_: object) -> None:
        self._stopping = True

    def _watch(self) -> bool:
        """Start and replace workers until the server is asked to stop; True if no worker can start."""
        from multiprocessing.connection import wait

        starting = set(self._workers)  # those of which no process has served yet
        while not self._stopping:
            now = time.monotonic()
            for worker in self._workers:
                if worker.process is None and worker.due <= now:
                    self._start(worker)
            watched = [worker.process.sentinel for worker in self._workers if worker.process is not None]
            wait([*watched, *(worker.word for worker in self._workers if worker.word is not None)], timeout=0.1)
            for worker in self._workers:
                if worker.word is not None and worker.word.poll():
                    with worker.word as word, contextlib.suppress(EOFError):  # it ended before it could serve
                        worker.word = None
                        word.recv_bytes()
                        if worker in starting:
                            starting.remove(worker)
                            if not starting:
                                self._serving()
                process = worker.process
                if process is None or process.is_alive() or self._stopping:
                    continue
                if len(starting) == len(self._workers) and process.exitcode != -signal.SIGKILL:
                    return True
                lived = time.monotonic() - worker.since
                worker.crashes = 1 if lived >= QUIET else worker.crashes + 1
                delay = min(SHORTEST * 2 ** (worker.crashes - 1), LONGEST)
                logger.error("worker %s ended with %s; the next one starts in %g s", process.pid, process.exitcode, delay)
                worker.process, worker.due = None, time.monotonic() + delay
        return False

    def _start(self, worker: Worker) -> None:
        worker.word, word = self._context.Pipe(duplex=False)

        def begin() -> None:
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            try:
                self._work(lambda: word.send_bytes(b"serving"))
            except StartFailed as error:
                logger.error("%s", error)
                raise SystemExit(1) from error

        with word:
            worker.process = process = self._context.Process(target=begin)
            worker.since = time.monotonic()
            process.start()

    def _end(self) -> None:
        processes = [worker.process for worker in self._workers if worker.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + self._grace + 1
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()
