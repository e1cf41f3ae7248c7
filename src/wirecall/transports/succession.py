"""Reloading: a server that SIGHUP replaces by a new process at the same address.

The new process is the same command. It reads the configuration, the app and the certificates again,
and shares the address with the process before it (SO_REUSEPORT). When it serves, the one before it
leaves (`leaving`). If it cannot start, it says why, and the one before it continues. So there is
always a server, with one worker and with several, under granian and uvicorn.

The process that the supervisor knows keeps its id: when its own server has ended, it becomes a
`keeper` of the new one.

| The first process | SIGHUP | the successor serves | the successor ends | SIGTERM |
| --- | --- | --- | --- | --- |
| serves | start a successor | - | - | stop |
| serves, with a successor that starts | start another later | leave, then keep | log it | stop both |
| leaves to its successor | the keeper starts the next | - | - | stop both |
| keeps (`keeper`) | start the next | - | end with its code | pass it on |
| keeps, with a next one that starts | start another later | let the last one leave | log it | pass it on |

A successor and its predecessor speak over a pair of sockets: first the `Handover`, then SERVING from
the successor, then LEAVE from the predecessor. A successor whose predecessor has gone stops.
"""

import asyncio
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import NoReturn

import msgspec
from msgspec import Struct

from wirecall.errors import UsageError
from wirecall.logs import announce, is_json, logger
from wirecall.transports.leaving import Signals
from wirecall.transports.workers import HANG_UP, STOPPING, Leave, wait_with_hang_up

# The file of the socket of a successor, and the plan of a keeper.
VARIABLE = "WIRECALL_INTERNAL_SUCCESSOR"
KEEPER_VARIABLE = "WIRECALL_INTERNAL_KEEPER"
KEEPER = "wirecall.transports.keeper"

# The successor serves, and has so many seconds to stop.
SERVING = struct.Struct("!7sd")
LEAVE = b"leave"
# Seconds that a process has to end after its time to stop.
LAST = 3.0


# Signals that wait until a keeper can take them.
HELD = {*STOPPING} if HANG_UP is None else {*STOPPING, HANG_UP}


class Handover(Struct):
    """What a successor must have in common with its predecessor."""

    # The address as it was configured, and the port that it stands for.
    address: str = ""
    port: int = 0
    ledger: str = ""
    # The secret that the first process has made, in hexadecimal; "" if the configuration has one.
    secret: str = ""


class Plan(Struct):
    """How successors are started. A keeper gets it from the process that it was."""

    command: list[str]
    folder: str
    environment: dict[str, str]
    handover: Handover
    # Seconds that the server has to stop.
    patience: float = 0.0
    is_json: bool = False
    # The server that a keeper keeps, and its socket.
    process: int = 0
    file: int = 0
    # Signals that came while the process became a keeper.
    late: list[int] = []


def written(plan: Plan) -> str:
    """Return a plan without its environment, which the keeper has: the system limits its length."""
    alone = msgspec.structs.replace(plan, environment={})
    # Of Python, since names of files may have bytes that are not UTF-8.
    return json.dumps(msgspec.to_builtins(alone))


def read_plan(environment: MutableMapping[str, str]) -> Plan:
    """Take the plan out of the environment of a keeper."""
    plan = msgspec.convert(json.loads(environment.pop(KEEPER_VARIABLE)), Plan)
    plan.environment = dict(environment)
    return plan


class Successor:
    """A newer process of this server."""

    def __init__(self, plan: Plan) -> None:
        self.word, theirs = socket.socketpair()
        with theirs:
            file = theirs.fileno()
            self.process = subprocess.Popen(
                plan.command,
                cwd=plan.folder,
                env={**plan.environment, VARIABLE: str(file)},
                pass_fds=[file],
            )
        self.word.sendall(msgspec.json.encode(plan.handover) + b"\n")
        self.word.setblocking(False)
        self.has_served = False
        # Seconds that it has to stop, which its configuration says.
        self.patience = plan.patience

    def serves(self) -> bool | None:
        """Return whether it serves; None if that is not known yet."""
        try:
            said = self.word.recv(SERVING.size)
        except BlockingIOError:
            return None
        except OSError:
            return False
        if len(said) < SERVING.size:
            return False
        _, self.patience = SERVING.unpack(said)
        self.has_served = True
        return True

    def end(self) -> None:
        """End it, in its own time if it serves already."""
        self.serves()
        seconds = LAST
        if self.has_served:
            seconds += self.patience
        self.word.close()
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def note_failure(process: "subprocess.Popen[bytes]") -> None:
    """Log that a successor could not start."""
    try:
        code = process.wait(LAST)
    except subprocess.TimeoutExpired:  # a thread of its app keeps it
        process.kill()
        code = process.wait()
    logger.error(
        "the reload has failed (process %d ended with %d, its own message is above): "
        "the server continues with the configuration that it had",
        process.pid,
        code,
    )


def note_success(pid: int) -> None:
    announce(f"Reloaded. Process {pid} serves now.")


class Predecessor:
    """The process that has started this one as its successor."""

    def __init__(self, file: int) -> None:
        self.word = socket.socket(fileno=file)
        line = b""
        while not line.endswith(b"\n"):
            read = self.word.recv(1)
            if not read:
                raise SystemExit(1)  # it has gone
            line += read
        self.handover = msgspec.json.decode(line, type=Handover)
        self.word.setblocking(False)

    def take_word(self) -> Leave | None:
        """Return why this process has to leave, or None."""
        try:
            word = self.word.recv(len(LEAVE))
        except BlockingIOError:
            return None
        except OSError:
            word = b""
        if word == LEAVE:
            return Leave.REPLACED
        return Leave.STOP


class Succession:
    """The processes before and after this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        wait_with_hang_up()
        self.plan = Plan(
            [sys.executable, *sys.orig_argv[1:]],
            os.getcwd(),
            {name: value for name, value in environment.items() if name != VARIABLE},
            Handover(),
        )
        self.predecessor: Predecessor | None = None
        if file := environment.get(VARIABLE):
            os.environ.pop(VARIABLE, None)
            self.predecessor = Predecessor(int(file))
        # The one that starts, or has replaced this process.
        self._successor: Successor | None = None
        # Whether the server of this process has left to its successor.
        self.is_replaced = False
        # Signals since then that the keeper has to take.
        self.late: list[int] = []
        # A successor was stopped together with this process.
        self._is_stopping = False
        # SIGHUP came while a successor was starting.
        self._is_asked_again = False

    def check(self, address: str, ledger: str) -> None:
        """Take the configuration; a successor refuses one that its predecessor cannot hand over."""
        handover = self.plan.handover
        handover.address = address
        handover.ledger = ledger
        if self.predecessor is None:
            return
        before = self.predecessor.handover
        for name, old, new in (
            ("address", before.address, address),
            ("ledger", before.ledger, ledger),
        ):
            if old != new:
                raise UsageError(
                    f"The {name} has changed from {old} to {new}.",
                    "a reload keeps it: until the old server has stopped, both would be in use",
                    "restart the server to change it",
                )
        handover.port = before.port

    # --- the server of this process ---------------------------------------------------------------

    def serving(self, port: int) -> None:
        """Note that this process serves."""
        self.plan.handover.port = port
        if self.predecessor is not None:
            self.predecessor.word.setblocking(True)
            with suppress(OSError):  # it has gone, which the next word says
                self.predecessor.word.sendall(SERVING.pack(b"serving", self.plan.patience))
            self.predecessor.word.setblocking(False)

    def begin(self) -> None:
        """Start a successor."""
        if self.predecessor is not None:
            return  # the first process does it
        if self.plan.handover.ledger.startswith("memory:"):
            logger.error(
                "SIGHUP: a ledger in memory cannot be handed over to a new process; "
                "restart the server, or use --ledger sqlite:PATH"
            )
            return
        if self._successor is not None:
            self._is_asked_again = True
            return
        try:
            self._successor = Successor(self.plan)
        except OSError as error:
            logger.error("the reload has failed: %s", error)

    @property
    def words(self) -> list[socket.socket]:
        """The sockets that are readable when `leave` has something new."""
        words = []
        if self.predecessor is not None:
            words.append(self.predecessor.word)
        if self._successor is not None and not self._is_stopping:
            words.append(self._successor.word)
        return words

    def leave(self) -> Leave | None:
        """Return why this process has to leave, or None."""
        if self.predecessor is not None and (why := self.predecessor.take_word()):
            return why
        if self._successor is None:
            return None
        serves = self._successor.serves()
        if serves:
            return Leave.REPLACED
        if serves is False and not self._is_stopping:
            successor = self._successor
            self._successor = None
            successor.word.close()
            note_failure(successor.process)
            if self._is_asked_again:
                self._is_asked_again = False
                self.begin()
        return None

    def follow(self, signals: Signals) -> None:
        """Do all this in the running loop."""
        loop = asyncio.get_running_loop()
        watched: set[socket.socket] = set()

        def watch() -> None:
            words = set(self.words)
            for each in watched - words:
                loop.remove_reader(each)
            for each in words - watched:
                loop.add_reader(each, look)
            watched.clear()
            watched.update(words)

        def look() -> None:
            before = set(watched)
            why = self.leave()
            if why is not None:
                for each in before:
                    loop.remove_reader(each)
                watched.clear()
                self.is_replaced = signals.leave_for(why) and self.predecessor is None
                return
            watch()

        def reload() -> None:
            self.begin()
            watch()

        signals.reload = reload
        signals.pass_on = self.pass_on
        watch()
        signals.take_early()

    def pass_on(self, number: int) -> None:
        """Take a signal of the first process: it is also for a successor.

        A successor stops at the same time as the server of this process, and not after it: it would
        look ready, and a supervisor does not wait for both.
        """
        if self._successor is None:
            return
        if number == HANG_UP:
            if self.is_replaced:  # it cannot be replaced before there is a keeper
                self.late.append(number)
            return
        self._is_stopping = True
        with suppress(ProcessLookupError):
            # Not by its `Popen`, which reaps a process that has ended: its keeper does.
            os.kill(self._successor.process.pid, signal.SIGTERM)

    # --- afterwards -------------------------------------------------------------------------------

    def close(self) -> None:
        """End a successor that has not replaced this process."""
        if self._successor is not None and not self.is_replaced:
            self._successor.end()
            self._successor = None

    def keep(self) -> None:
        """Become the keeper of the process that has replaced this one. Else return."""
        if self.is_replaced and self._successor is not None:
            self._become_keeper(self._successor)

    def hold(self, release: Callable[[], None] = lambda: None) -> None:
        """Keep the signals that come until this process is a keeper; `release` its other handlers.

        They wait in the kernel, which keeps them over `exec`. Another thread of the app may take
        one: that one is noted.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        release()
        for number in HELD:
            signal.signal(number, lambda number, _frame: self.late.append(number))

    def _become_keeper(self, successor: Successor) -> NoReturn:
        # Before the message: its reader may send a signal at once.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        note_success(successor.process.pid)
        self.plan.process = successor.process.pid
        self.plan.patience = successor.patience
        self.plan.file = successor.word.fileno()
        self.plan.is_json = is_json()
        os.set_inheritable(self.plan.file, True)
        sys.stderr.flush()
        sys.stdout.flush()
        self.plan.late = self.late
        if self._is_asked_again and HANG_UP is not None:
            self.plan.late.append(HANG_UP)
        variables = {**self.plan.environment, KEEPER_VARIABLE: written(self.plan)}
        # A fresh process image: it has nothing of the old app, whatever its threads do.
        os.execve(sys.executable, [sys.executable, "-m", KEEPER], variables)


def wait_for(words: list[socket.socket], seconds: float) -> None:
    """Wait until one of the sockets is readable."""
    # Not `select`: it takes no file above 1023, and a busy server has such files.
    with selectors.DefaultSelector() as ready:
        for each in words:
            with suppress(OSError, ValueError):  # it was closed
                ready.register(each, selectors.EVENT_READ)
        ready.select(seconds)
