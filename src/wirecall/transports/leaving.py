"""How a server leaves: the signals that stop it, and the time before its listeners close.

| Signal | While it serves | While it drains | While it stops |
| --- | --- | --- | --- |
| SIGTERM | drain, then stop | stop now | - |
| SIGINT (Ctrl-C) | stop | stop now | end at once |
| SIGHUP | reload, where that is possible; else stop. A worker leaves it to its parent | - | - |
| SIGUSR1, SIGUSR2 | logged | logged | logged |

While a server drains, `/readyz` is 503 and everything else is served, so that a load balancer sends
requests elsewhere before there is nothing that takes them. A server that another process has
replaced drains too, and stays ready: the address is served.

SIGHUP also means that the terminal was closed. Then it stops the server.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Collection

from wirecall.transports.workers import (
    HANG_UP,
    EarlyHangUp,
    Leave,
    Orders,
    has_terminal,
    log_unused,
    stopping_signals,
    unused_signals,
)

# Seconds in which the answers of a server that was replaced send their clients to the new one.
REPLACED = 1.0
# Seconds between the last handshake of a listener and its end.
SETTLE = 0.1
# Seconds that the server waits for requests of connections that it has accepted, after that.
LATEST = 2.0


def time_to_stop(drain: float, grace: float) -> float:
    """Return the seconds that a server may take to stop, whatever it leaves for."""
    return max(drain, REPLACED) + SETTLE + LATEST + grace


class Signals:
    """The signals that a server catches in the running loop.

    `reload` is called for SIGHUP; without it, SIGHUP stops the server. A worker has the files of its
    parent (`Orders`).
    """

    def __init__(self, stop: asyncio.Event, orders: Orders | None = None) -> None:
        self.leave = Leave.STOP
        self.reload: Callable[[], None] | None = None
        # Called with each signal that stops or reloads: it may be for a successor, too.
        self.pass_on: Callable[[int], None] | None = None
        # Set when the server must not drain any longer.
        self.hurried = asyncio.Event()
        self._stop = stop
        self._orders = orders
        self._had_terminal = has_terminal()
        self._loop = asyncio.get_running_loop()
        self._caught: list[signal.Signals] = []
        # The handler of SIGHUP before this one.
        self._early: object = None

    def catch(self) -> None:
        """Let signals stop or reload the server, and log those that have no use."""
        if self._orders is not None:
            self._loop.add_reader(self._orders.replaced, self._replace, self._orders.replaced)
            self._loop.add_reader(self._orders.hurry, self._hurry_up, self._orders.hurry)
        # Fails in a thread and on Windows, where Ctrl+C ends asyncio.run with an exception.
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            if HANG_UP is not None:
                self._early = signal.getsignal(HANG_UP)
            for number in stopping_signals():
                self._loop.add_signal_handler(number, self._ask, number)
                self._caught.append(number)
            for number in unused_signals():
                self._loop.add_signal_handler(number, log_unused, number)
                self._caught.append(number)

    def take_early(self) -> None:
        """Take the SIGHUP that came before these were caught."""
        if isinstance(self._early, EarlyHangUp) and self._early.has_come:
            self._hang_up()

    def release(self, numbers: Collection[signal.Signals] | None = None) -> None:
        """Catch these signals no more; None stands for all of them."""
        for number in tuple(self._caught):
            if numbers is None or number in numbers:
                self._caught.remove(number)
                self._loop.remove_signal_handler(number)

    def leave_for(self, why: Leave) -> bool:
        """Leave, unless the server leaves already; return whether this is why it does."""
        if self._stop.is_set():
            return False
        self.leave = why
        self._stop.set()
        return True

    # Nothing is read of these files: they stay readable for the other workers.

    def _replace(self, file: int) -> None:
        self._loop.remove_reader(file)
        self.leave_for(Leave.REPLACED)

    def _hurry_up(self, file: int) -> None:
        self._loop.remove_reader(file)
        self.hurried.set()

    def _ask(self, number: signal.Signals) -> None:
        if self.pass_on is not None:
            self.pass_on(number)
        if number == HANG_UP:
            self._hang_up()
        elif not self._stop.is_set():
            if number == signal.SIGTERM:
                self.leave = Leave.DRAIN
            self._stop.set()
        elif self.leave is not Leave.STOP and not self.hurried.is_set():
            self.hurried.set()
        elif number == signal.SIGINT:
            # The second Ctrl+C: a person does not want to wait.
            self._loop.remove_signal_handler(number)
            signal.raise_signal(number)

    def _hang_up(self) -> None:
        if self._orders is not None:
            return
        if self.reload is None or (self._had_terminal and not has_terminal()):
            self._stop.set()
        elif not self._stop.is_set():
            self.reload()
