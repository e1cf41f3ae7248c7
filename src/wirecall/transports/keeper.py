"""The process that the supervisor knows, after a reload: it passes signals on to the server.

See the table in `succession`.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

from wirecall.logs import JsonFormatter, logger
from wirecall.transports.succession import (
    HELD,
    LAST,
    LEAVE,
    Plan,
    Successor,
    note_failure,
    note_success,
    read_plan,
    wait_for,
)
from wirecall.transports.workers import HANG_UP, UNUSED, has_terminal, log_unused


class Kept:
    """A server that serves.

    The first one was started by this process before it was a keeper, and has no `process`.
    """

    def __init__(
        self,
        pid: int,
        word: socket.socket,
        patience: float,
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self.pid = pid
        self.word = word
        # Seconds that it has to stop.
        self.patience = patience
        self.code: int | None = None
        self._process = process

    def has_ended(self) -> bool:
        if self._process is not None:
            self.code = self._process.poll()
        elif self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def send(self, number: int) -> None:
        if not self.has_ended():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def leave(self) -> None:
        """Let it leave to its successor."""
        with suppress(OSError):
            self.word.sendall(LEAVE)


class Keeper:
    """Keeps a server, and replaces it by a newer one at SIGHUP."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._kept = Kept(plan.process, socket.socket(fileno=plan.file), plan.patience)
        # Those that were replaced, and have not ended.
        self._leaving: list[Kept] = []
        self._next: Successor | None = None
        self._had_terminal = has_terminal()
        self._is_asked = False
        self._is_stopping = False
        self._deadline = 0.0
        self._unused: list[int] = []

    def run(self) -> int:
        """Keep servers until a signal, or until one ends; return its exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        if HANG_UP is not None:
            signal.signal(HANG_UP, self._hang_up)
        for unused in UNUSED:
            signal.signal(unused, lambda number, _frame: self._unused.append(number))
        for late in self._plan.late:
            signal.raise_signal(late)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        while True:
            wait_for(self._words(), 0.1)
            while self._unused:
                log_unused(self._unused.pop())
            self._forget_ended()
            if self._is_stopping:
                if self._have_ended():
                    return self._code()
                continue
            self._reload()
            if self._next is None and self._kept.has_ended():
                return self._code()

    def _words(self) -> list[socket.socket]:
        """Return the sockets that may have something new."""
        words = []
        # That of a server that has ended is always readable.
        if not self._is_stopping and not self._kept.has_ended():
            words.append(self._kept.word)
        if not self._is_stopping and self._next is not None:
            words.append(self._next.word)
        return words

    def _reload(self) -> None:
        if self._is_asked and self._next is None:
            self._is_asked = False
            try:
                self._next = Successor(self._plan)
            except OSError as error:
                logger.error("the reload has failed: %s", error)
        if self._next is None:
            return
        serves = self._next.serves()
        if serves is None:
            return
        successor = self._next
        self._next = None
        if not serves:
            successor.word.close()
            note_failure(successor.process)
            return
        self._kept.leave()
        self._leaving.append(self._kept)
        process = successor.process
        self._kept = Kept(process.pid, successor.word, successor.patience, process)

    def _forget_ended(self) -> None:
        ended = [each for each in self._leaving if each.has_ended()]
        if not ended:
            return
        self._leaving = [each for each in self._leaving if each not in ended]
        for each in ended:
            each.word.close()
        if not self._leaving:
            note_success(self._kept.pid)

    def _hang_up(self, *_: object) -> None:
        if self._had_terminal and not has_terminal():
            self._stop()
        else:
            self._is_asked = True

    def _stop(self, *_: object) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            patience = max(each.patience for each in (self._kept, *self._leaving))
            self._deadline = time.monotonic() + patience + LAST
        for each in (self._kept, *self._leaving):
            each.send(signal.SIGTERM)
        if self._next is not None:
            self._next.process.terminate()

    def _have_ended(self) -> bool:
        """Return whether all servers have ended; kill them when their time is over."""
        every = [self._kept, *self._leaving]
        if self._next is not None:
            process = self._next.process
            every.append(Kept(process.pid, self._next.word, self._next.patience, process))
        rest = [each for each in every if not each.has_ended()]
        if rest and time.monotonic() > self._deadline:
            for each in rest:
                each.send(signal.SIGKILL)
        return not rest

    def _code(self) -> int:
        code = self._kept.code or 0
        if code < 0:
            logger.error("the server was ended by signal %d", -code)
            return 1
        return code


def main() -> None:
    plan = read_plan(os.environ)
    if plan.is_json:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    sys.exit(Keeper(plan).run())


if __name__ == "__main__":
    main()
