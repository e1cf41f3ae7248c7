"""Several workers: copies of this process (fork), each with its own socket on the same address.

1. The parent does not serve. It forwards signals, and replaces a worker that ended.
2. A worker that crashes while it serves is replaced, however often: one bad call must not end the
   server. Each crash doubles the delay before the next start, up to `LONGEST`; after `QUIET`
   seconds without a crash it is `SHORTEST` again.
3. If the first workers end before they serve, the app cannot start: the parent gives up.
4. The workers use the time to stop themselves. The parent kills the remaining ones a second later.
   After a second signal they drain no longer (`leaving`). A pipe says so: two signals of the same
   number may reach a busy worker as one.
5. When another process has replaced the server, a second pipe says so, and not a signal: SIGHUP also
   reaches the workers when it is sent to all processes, and then only the parent knows whether
   there is another server.
"""

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from wirecall.errors import StartFailed, UsageError
from wirecall.logs import logger

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from wirecall.transports.succession import Succession

# SIGTERM, SIGINT and, when its terminal is closed, SIGHUP stop a server with grace. Windows has no
# SIGHUP.
STOPPING: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)
HANG_UP: signal.Signals | None = getattr(signal, "SIGHUP", None)

# Tools that rotate logs send these. They would kill a process that does not catch them.
UNUSED = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))

# Seconds before a crashed worker is replaced, at least and at most. Until then the others take the
# connections.
SHORTEST = 0.1
LONGEST = 10.0
QUIET = 60.0


class Leave(Enum):
    """Why a server leaves."""

    # Load balancers have to see it first.
    DRAIN = "drain"
    # Another process serves the address.
    REPLACED = "replaced"
    # At once, with grace for the calls in flight.
    STOP = "stop"


Handler = Callable[[int, FrameType | None], object]


def has_terminal() -> bool:
    """Return whether this process has a terminal that is open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


class EarlyHangUp:
    """Handles SIGHUP until the server serves. By default it would end the process.

    A supervisor takes that for a good end, and does not start the process again.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._had_terminal = has_terminal()

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._had_terminal and not has_terminal():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.has_come = True


def wait_with_hang_up() -> None:
    """Let SIGHUP wait until the server serves, unless the user's program handles or ignores it."""
    if HANG_UP is not None and signal.getsignal(HANG_UP) is signal.SIG_DFL:
        signal.signal(HANG_UP, EarlyHangUp())


def stopping_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a server.

    SIGHUP is not one if the user's program handles or ignores it, as under nohup.
    """
    if HANG_UP is None:
        return STOPPING
    handler = signal.getsignal(HANG_UP)
    if handler is signal.SIG_DFL or isinstance(handler, EarlyHangUp):
        return (*STOPPING, HANG_UP)
    return STOPPING


def unused_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that are logged and otherwise ignored.

    The user's program does not handle these.
    """
    return tuple(number for number in UNUSED if signal.getsignal(number) is signal.SIG_DFL)


def log_unused(number: int) -> None:
    name = signal.Signals(number).name
    logger.warning("%s is ignored: SIGTERM stops the server", name)


class Orders(NamedTuple):
    """Files that become readable for a worker, and stay so."""

    # Another process has replaced the server.
    replaced: int
    # It must drain no longer.
    hurry: int


# Receives what to call once it serves, and the files of its parent.
Work = Callable[[Callable[[], None], Orders], None]


class Worker:
    """One worker and its successors."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None
        # Readable when the worker serves, or has ended before it could.
        self.word: Connection | None = None
        # When the process started.
        self.since = 0.0
        # When the next process starts.
        self.due = 0.0
        # How many processes crashed in a row.
        self.crashes = 0


class Workers:
    """Runs `work` in `count` processes until a signal; then they have `patience` seconds to stop.

    See `Work`.
    """

    def __init__(
        self,
        work: Work,
        count: int,
        patience: float,
        serving: Callable[[], None],
        succession: "Succession | None" = None,
    ) -> None:
        from multiprocessing import get_all_start_methods, get_context

        if "fork" not in get_all_start_methods():
            raise UsageError(
                f"workers={count} is not possible.", "several workers need fork", "use workers=1"
            )
        self._context: Any = get_context("fork")
        self._work = work
        # Seconds that a worker has to stop.
        self._patience = patience
        # Called once, when all workers serve.
        self._serving = serving
        self._stopping = False
        # The processes that a reload puts in the place of this one.
        self._succession = succession
        self._had_terminal = has_terminal()
        # SIGHUP came, and is not a closed terminal.
        self._is_reload_asked = False
        # Whether another process serves the address.
        self._is_replaced = False
        # Ignored signals that have to be logged.
        self._unused: deque[int] = deque()
        self._workers = [Worker() for _ in range(count)]
        # The workers that have not served yet.
        self._starting = set(self._workers)
        replaced, self._replace = os.pipe()
        hurried, self._hurry = os.pipe()
        self._orders = Orders(replaced, hurried)

    def run(self) -> None:
        """Serve until a signal; StartFailed if the app cannot start."""
        unused = dict.fromkeys(unused_signals(), self._note)
        caught: dict[signal.Signals, Handler] = {
            **dict.fromkeys(stopping_signals(), self._ask),
            **unused,
        }
        before = {number: signal.signal(number, handler) for number, handler in caught.items()}
        self._caught = tuple(caught)
        if HANG_UP is not None:
            early = before.get(HANG_UP)
            if isinstance(early, EarlyHangUp) and early.has_come:
                self._ask(HANG_UP, None)
        try:
            failed = self._watch()
        finally:
            self._end()
            if self._succession is not None and self._succession.is_replaced:
                self._succession.hold()
            else:
                for number, handler in before.items():
                    signal.signal(number, handler)
            for file in (*self._orders, self._replace, self._hurry):
                os.close(file)
        if failed:
            raise StartFailed("a worker ended before it could serve; its own message is above")

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        is_replaced = self._succession is not None and self._succession.is_replaced
        if self._succession is not None:
            self._succession.pass_on(number)
        is_reload = number == HANG_UP and self._succession is not None
        if is_reload and not (self._had_terminal and not has_terminal()):
            self._is_reload_asked = not is_replaced
            return
        if self._stopping:
            os.write(self._hurry, b"!")
        self._stopping = True

    def _reload(self) -> None:
        """Start a successor if one was asked for; stop if one serves."""
        succession = self._succession
        if succession is None or self._stopping:
            return
        if self._is_reload_asked:
            self._is_reload_asked = False
            succession.begin()
        why = succession.leave()
        if why is None:
            return
        if why is Leave.REPLACED:
            # From here on, signals are meant for the successor.
            succession.is_replaced = succession.predecessor is None
        if self._stopping:
            succession.is_replaced = False
            return
        if succession.is_replaced and self._is_reload_asked and HANG_UP is not None:
            succession.late.append(HANG_UP)
        if why is Leave.REPLACED:
            # The address is served: they stay ready until their connections are closed.
            self._is_replaced = True
        self._stopping = True

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # A handler interrupts anything, even a line that is being logged.
        self._unused.append(number)

    def _watch(self) -> bool:
        """Start and replace workers until the server has to stop; True if no worker can start."""
        while not self._stopping:
            while self._unused:
                log_unused(self._unused.popleft())
            now = time.monotonic()
            for worker in self._workers:
                if worker.process is None and worker.due <= now:
                    self._start(worker)
            self._wait()
            self._reload()
            for worker in self._workers:
                if worker.word is not None and worker.word.poll():
                    self._take_word(worker)
                process = worker.process
                if process is None or process.is_alive() or self._stopping:
                    continue
                has_none_served = len(self._starting) == len(self._workers)
                if has_none_served and process.exitcode != -signal.SIGKILL:
                    return True
                self._plan_next(worker, process)
        return False

    def _wait(self) -> None:
        """Wait until a worker serves or ends, for a moment."""
        from multiprocessing.connection import wait

        ends = [worker.process.sentinel for worker in self._workers if worker.process is not None]
        words = [worker.word for worker in self._workers if worker.word is not None]
        more = [] if self._succession is None else self._succession.words
        wait([*ends, *words, *more], timeout=0.1)

    def _take_word(self, worker: Worker) -> None:
        """Note that a worker serves, or has ended before it could."""
        assert worker.word is not None
        with worker.word as word, contextlib.suppress(EOFError):
            worker.word = None
            word.recv_bytes()
            if worker in self._starting:
                self._starting.remove(worker)
                if not self._starting:
                    self._serving()

    def _plan_next(self, worker: Worker, process: "BaseProcess") -> None:
        """Plan the successor of a process that has ended."""
        if time.monotonic() - worker.since >= QUIET:
            worker.crashes = 0
        worker.crashes += 1
        delay = min(SHORTEST * 2 ** (worker.crashes - 1), LONGEST)
        logger.error(
            "worker %s ended with %s; the next one starts in %g s",
            process.pid,
            process.exitcode,
            delay,
        )
        worker.process = None
        worker.due = time.monotonic() + delay

    def _start(self, worker: Worker) -> None:
        worker.word, word = self._context.Pipe(duplex=False)

        def begin() -> None:
            for each in self._caught:
                signal.signal(each, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._caught)
            try:
                self._work(lambda: word.send_bytes(b"serving"), self._orders)
            except StartFailed as error:
                logger.error("%s", error)
                raise SystemExit(1) from error

        with word:
            worker.process = process = self._context.Process(target=begin)
            worker.since = time.monotonic()
            # The copies of this process's handlers would swallow a signal in the worker.
            signal.pthread_sigmask(signal.SIG_BLOCK, self._caught)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, self._caught)

    def _end(self) -> None:
        processes = [worker.process for worker in self._workers if worker.process is not None]
        if self._is_replaced:
            os.write(self._replace, b"!")
        else:
            for process in processes:
                process.terminate()
        deadline = time.monotonic() + self._patience + 1
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()
