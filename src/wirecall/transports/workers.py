"""Several workers: copies of this process (fork), each with a socket of its own on the same address.

1. The parent serves nobody. It passes signals on, and starts a worker anew that died.
2. A worker that dies right after its start would die again, unless somebody killed it: then all of them end.
3. The grace time is the workers' own. Who is still there a little later is killed.
"""

import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wirecall.errors import UsageError, WirecallError
from wirecall.logs import logger

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A worker that dies sooner than this after its start would die again, unless somebody killed it.
SHORT_LIFE = 5.0


class Workers:
    """Copies of this process, each at its place with its own socket."""

    def __init__(self, work: Callable[[int], None], listeners: list[socket.socket], grace: float) -> None:
        from multiprocessing import get_all_start_methods, get_context

        if "fork" not in get_all_start_methods():
            raise UsageError(f"workers={len(listeners)} is not possible.", "several workers need fork", "use workers=1")
        self._context: Any = get_context("fork")
        self._work = work
        self._listeners = listeners
        self._grace = grace
        self._stopping = False
        self._workers: dict[BaseProcess, tuple[int, float]] = {}  # place and start

    def run(self) -> None:
        before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        try:
            for place in range(len(self._listeners)):
                self._start(place)
            failed = self._watch()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        if failed:
            raise WirecallError("a worker ended right after its start; its own message is above")

    def _start(self, place: int) -> None:
        worker = self._context.Process(target=self._begin, args=(place,))
        worker.start()
        self._workers[worker] = place, time.monotonic()

    def _begin(self, place: int) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for other, listener in enumerate(self._listeners):
            if other != place:
                listener.close()
        self._work(place)

    def _ask(self, *_: object) -> None:
        self._stopping = True

    def _watch(self) -> bool:
        """Until somebody asks to stop; True if a worker cannot live."""
        from multiprocessing.connection import wait

        while not self._stopping:
            wait([worker.sentinel for worker in self._workers], timeout=0.2)
            for worker, (place, since) in list(self._workers.items()):
                if worker.is_alive() or self._stopping:
                    continue
                del self._workers[worker]
                if time.monotonic() - since < SHORT_LIFE and worker.exitcode != -signal.SIGKILL:
                    return True
                logger.error("worker %s ended with %s; starting another", worker.pid, worker.exitcode)
                self._start(place)
        return False

    def _end(self) -> None:
        """The grace time is the workers' own; who is still there a little later is killed."""
        for listener in self._listeners:
            listener.close()  # or the kernel would keep new connections waiting for workers that are leaving
        for worker in self._workers:
            worker.terminate()
        deadline = time.monotonic() + self._grace + 1
        for worker in self._workers:
            worker.join(max(deadline - time.monotonic(), 0))
            if worker.is_alive():
                worker.kill()
                worker.join()
