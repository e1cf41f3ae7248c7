"""A command under way: what its handler sees of it, who waits for it, what keeps it alive, and who takes note of its end."""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from wirecall.errors import CannotWait, KeyConflict, KeyInProgress, LedgerUnavailable
from wirecall.ledger.base import Claim, Ledger, LedgerDown, Outcome, Record, State, Token
from wirecall.logs import logger
from wirecall.process import loop_if_any, running_loop
from wirecall.server.context import Context, Passed
from wirecall.server.method import Method

# What a caller who must come back is told.
RETRY_AFTER_MS = 1000

# Seconds between two renewals of a lease, at least: no event loop keeps a shorter one alive, and it should not try.
LEAST_BEAT = 0.01

# Calls the handler: gives what it returned, or something to await for it.
Call = Callable[[], Any]

# Told about every call of a command that was admitted: arguments' digest, start, error.
Note = Callable[[Context, bytes, float, BaseException | None], None]


class Run:
    """A command under way, as its handler's context sees it."""

    __slots__ = (
        "alone",
        "attempt",
        "cancelled",
        "claim",
        "committed",
        "context",
        "db",
        "ended",
        "fence",
        "forsaken",
        "interruptible",
        "ledger",
        "loop",
        "marked",
        "method",
        "others",
        "passed",
        "token",
    )

    def __init__(self, method: Method, context: Context, claim: Claim, alone: bool) -> None:
        self.method = method
        self.context = context
        self.claim = claim
        self.alone = alone  # no event loop: nothing may wait
        self.ledger: Ledger | None = None
        self.token: Token | None = None
        self.attempt = 1
        self.fence = 0
        self.committed = False  # from here on, it may have happened
        self.marked = False  # the handler has called ctx.commit_point()
        self.passed = False  # the ledger knows that the run is committed
        self.interruptible = False  # the handler runs, and no transition is under way
        self.cancelled = False
        self.forsaken = False  # its caller left while the claim was on its way
        self.others = False  # another run of the same command was seen
        self.db: Any = None
        self.ended: asyncio.Future[Any] | None = None  # what its caller awaits
        self.loop: asyncio.AbstractEventLoop | None = None if alone else running_loop()

    @property
    def goes_on(self) -> bool:
        """Whether it is finished although nobody waits for it: it may have done something; in a transaction, elsewhere."""
        return self.committed or (self.marked and self.db is not None)

    @property
    def downstream_key(self) -> str:
        id = self.claim.id
        text = "\0".join((id.caller, id.method, id.key)).encode()
        return hmac.new(b"wirecall downstream key", text, hashlib.sha256).hexdigest()[:32]

    def holds(self, record: Record) -> bool:
        """Whether the ledger granted the record to this run."""
        return record.state is State.RUNNING and record.nonce == self.claim.nonce

    def granted(self, ledger: Ledger, record: Record) -> None:
        self.ledger = ledger
        self.token = record.token
        self.attempt = record.attempts
        self.fence = record.fence
        self.committed = self.passed = self.claim.committed

    def commit_point(self) -> Awaitable[None]:
        """From the moment of the call the run counts as committed here; the awaitable writes that to the ledger.

        Called again, it writes again until the ledger has taken it: a handler that tries once more must not slip past.
        """
        self.marked = True
        if self.passed or self.db is not None:
            return Passed()
        if self.loop is None:
            return _stepped(self._write_commit_point())
        if loop_if_any() is not None:  # else: a thread beside it
            self.committed = True
            return self._write_commit_point()
        asyncio.run_coroutine_threadsafe(self._write_commit_point(), self.loop).result()
        return Passed()

    async def _write_commit_point(self) -> None:
        """Unless the ledger says that it is written, the handler goes no further, so nothing was done."""
        assert self.ledger is not None and self.token is not None
        self.committed = self.passed or not self.cancelled
        try:
            if not self.cancelled and await self.ledger.commit_point(self.token, self.method.terms.lease):
                self.passed = True
                return
        except LedgerDown:
            self.committed = self.passed
            raise
        self.committed = self.passed
        raise LostLease(f"{self.claim.id}: the lease was over before the commit point")


def in_progress() -> KeyInProgress:
    """Another run of the command is under way, or was until a moment ago: nobody here knows how it ends."""
    return KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS)


class LostLease(Exception):
    """Another holder took the command over: this one must stop before its effect."""


def _stepped(coroutine: Coroutine[Any, Any, None]) -> Awaitable[None]:
    try:
        coroutine.send(None)
    except StopIteration:
        return Passed()
    coroutine.close()
    raise CannotWait


def in_thread(call: Call) -> Awaitable[Any]:
    """Call a function that blocks in a thread beside the loop."""
    return asyncio.to_thread(_without_stop, call)


def _without_stop(call: Call) -> Any:
    try:
        return call()
    except (StopIteration, GeneratorExit) as error:  # of a future, the one is refused, and the other closes who awaits it
        raise RuntimeError(f"the function raised {type(error).__name__}") from error


async def settled(result: Any) -> Any:
    """What a function returned, once nothing in it has to be awaited any more."""
    while hasattr(result, "__await__"):
        result = await result
    return result


def is_waiting(error: BaseException) -> bool:
    """Whether a handler failed because it needs an event loop and there is none."""
    return isinstance(error, RuntimeError) and str(error) == "no running event loop"


def is_closing(error: BaseException) -> bool:
    """Whether the coroutine that caught an exception is being closed, in contrast to a handler that raised GeneratorExit.

    Python closes the coroutine that is awaited first, and then raises a new GeneratorExit in the one that awaits it. So that
    one comes from no frame below; a handler's own does.
    """
    trace = error.__traceback__
    return isinstance(error, GeneratorExit) and (trace is None or trace.tb_next is None)


class Noted:
    """Takes note, once, of how a call of a command ended, whoever is still there to hear it."""

    def __init__(self, note: Note | None, context: Context, fingerprint: bytes) -> None:
        self._note, self._context, self._fingerprint = note, context, fingerprint
        self._started = time.perf_counter()

    def __call__(self, error: BaseException | None = None) -> None:
        if self._note is not None:
            self._note(self._context, self._fingerprint, self._started, error)


def not_noted(_: BaseException | None = None) -> None:
    """In place of `Noted` where nobody keeps notes."""


class Flight:
    """The one run of a command in this process, and those who wait for it."""

    __slots__ = ("_fingerprint", "_landed", "_waiting", "is_granted", "is_refused")

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint
        self.is_granted = False
        self.is_refused = False  # the ledger is away: who waits need not find out one after another
        self._waiting: list[asyncio.Future[Outcome | None]] = []
        self._landed: tuple[Outcome | None] | None = None

    async def join(self, fingerprint: bytes, wait: float) -> Outcome | None:
        """The outcome, or None when the run ended without one."""
        if fingerprint != self._fingerprint and self.is_granted:
            raise KeyConflict(ran="no")
        future = self.ended()
        try:
            async with asyncio.timeout(wait):
                outcome = await future
                if self.is_refused:
                    raise LedgerUnavailable(ran="no")
                # Until the ledger has granted it, nobody knows whose params are the right ones: ask for yourself.
                return outcome if fingerprint == self._fingerprint else None
        except TimeoutError:
            raise in_progress() from None

    def ended(self) -> "asyncio.Future[Outcome | None]":
        future: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if self._landed is not None:  # in another thread, a moment ago
            _tell(future, *self._landed)
        return future

    def land(self, outcome: Outcome | None) -> None:
        """Tell all who wait. Some may wait in the loop of another thread, which sleeps until it is woken."""
        self._landed = (outcome,)  # before the others are counted: who comes after that sees it
        here = loop_if_any() if self._waiting else None
        for future in self._waiting:
            if future.get_loop() is here:
                _tell(future, outcome)
                continue
            with suppress(RuntimeError):  # its loop is closed, and nobody waits any more
                future.get_loop().call_soon_threadsafe(_tell, future, outcome)


def _tell(future: "asyncio.Future[Outcome | None]", outcome: Outcome | None) -> None:
    if not future.done():
        future.set_result(outcome)


class Heartbeats:
    """Renews the leases of the runs under way, each after a third of it. One timer serves all runs of an event loop, since
    few live that long; threads may have loops of their own. A renewal waits for the one before it: a store that is slow
    already is not asked for more."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._spawn = spawn
        self._due: dict[Run, float | None] = {}  # by the clock of the loop that the run is in; None: it is being renewed
        self._timers: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}

    def start(self, run: Run) -> None:
        assert run.loop is not None
        self._plan(run, run.loop, run.loop.time())

    def stop(self, run: Run) -> None:
        """The timer stays: the next run is likely to come before it, and to cancel one costs more than to let it pass."""
        self._due.pop(run, None)

    def rest(self) -> None:
        """No run will come."""
        if not self._due and (timer := self._timers.pop(asyncio.get_running_loop(), None)):
            timer.cancel()

    def _plan(self, run: Run, loop: asyncio.AbstractEventLoop, renewed: float) -> None:
        timer = self._timers.get(loop)
        self._due[run] = due = renewed + max(run.method.terms.lease / 3, LEAST_BEAT)
        if timer is None:
            self._forget_closed()
        if timer is None or timer.when() > due:
            self._arm(loop, due)

    def _forget_closed(self) -> None:
        """What a loop that is closed has left behind is over."""
        for loop in [loop for loop in list(self._timers) if loop.is_closed()]:
            self._timers.pop(loop, None)
        for run in [run for run in list(self._due) if run.loop and run.loop.is_closed()]:
            self._due.pop(run, None)

    def _arm(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if timer := self._timers.get(loop):
            timer.cancel()
        self._timers[loop] = loop.call_at(due, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        del self._timers[loop]
        now = loop.time()
        ours = [(run, due) for run, due in list(self._due.items()) if run.loop is loop and due is not None]
        for run, due in ours:
            if due <= now:
                self._due[run] = None
                self._spawn(self._renew(run, loop, now))
        if later := [due for _, due in ours if due > now]:
            self._arm(loop, min(later))

    async def _renew(self, run: Run, loop: asyncio.AbstractEventLoop, begun: float) -> None:
        assert run.ledger is not None and run.token is not None
        try:
            if not await run.ledger.heartbeat(run.token, run.method.terms.lease):
                self._due.pop(run, None)  # another has it now
        except LedgerDown as error:
            logger.warning("%s: no heartbeat: %s", run.claim.id, error)
        finally:
            if run in self._due and not loop.is_closed():
                self._plan(run, loop, begun)  # from its begin, as the store may have counted the lease from there
