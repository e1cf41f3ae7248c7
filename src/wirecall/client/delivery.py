"""`Delivery`: sends entries on one link until each of them is settled.

    deliver -> attempts (one exchange on the link each), with pauses between them -> rounds that the dialect asks for

1. Every entry is settled by its deadline, and with exactly one of: a result; `NotSent`; refused (`ran == "no"`); ran, with
   the error; unknown (`ran == "unknown"`).
2. A call is repeated only if it is safe to repeat (`Entry.safe`: it only reads, or it has an idempotency key) and if that
   may help: the server was not reached, the answer was lost, or the server asks to come again.
3. Between attempts the client waits a random time of up to `first` seconds, doubled each time, up to `cap` (full jitter),
   and never less than the server asked for. No attempt begins after the deadline of the call.
4. "It has not run" is said of all attempts. After one that was lost, the refusal of the next says nothing about the first.
5. An entry that goes alone is delivered in its caller's task: the straight way starts none.
"""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from msgspec import UNSET, Struct

from wirecall.client.exchange import AnyEntry, Arrays, Exchange, Link, LocalLink, Wire
from wirecall.errors import (
    BadAnswer,
    Busy,
    CallFailed,
    ConnectionLost,
    Declined,
    EncodeError,
    KeyInProgress,
    LedgerUnavailable,
    NotSent,
    RpcError,
    TimedOut,
    UsageError,
)
from wirecall.jsonrpc import make_batch
from wirecall.protocol.messages import UNREADABLE, decode_value, encode
from wirecall.protocol.models import wanted
from wirecall.stepping import Timeouts, cancel_all, first_step, wake
from wirecall.transports.sse import LONGEST_WAIT

if TYPE_CHECKING:
    from wirecall.auth.client import Credentials

T = TypeVar("T")

LEAST = 0.001  # seconds that an attempt needs at the very least
AT_ONCE = 32  # entries of a batch that leave as single requests at the same time
DOUBLINGS = 60  # of a pause; a float has room for 1023

# Answers of proxies and servers that say "not now". Any other status will be the same the next time.
_LATER = frozenset({429, 502, 503, 504})
# A bad answer is not among them: a server that sends garbage once will do so again.
_LOST = (NotSent, ConnectionLost, TimedOut, KeyInProgress, Busy, LedgerUnavailable)


# --- options ---------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """The time between attempts, for tests to replace."""

    def time(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    """Seconds that pass by themselves."""

    time = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)


class Retry(Struct, frozen=True, kw_only=True):
    """How a call that may be repeated is repeated."""

    attempts: int = 8
    first: float = 0.1
    cap: float = 10.0
    silence: float | None = None  # seconds without an answer after which an attempt counts as lost; None: the whole timeout

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first <= self.cap or (self.silence is not None and not self.silence > 0):
            raise UsageError(f"{self!r} cannot be followed.", fix="attempts >= 1, 0 <= first <= cap, silence > 0")

    def pause(self, attempt: int, asked: float, chance: float) -> float:
        """Return the seconds between attempt number `attempt` and the next; `chance` is a random number from 0 to 1."""
        return max(asked, chance * min(self.cap, self.first * 2.0 ** min(attempt - 1, DOUBLINGS)))


class Options(Struct, kw_only=True):
    """The options of every client; `connect` explains each of them."""

    timeout: float = 30.0
    retry: Retry = Retry()
    headers: Mapping[str, str] = {}
    auth: "Credentials | None" = None
    coalesce: float | None = None
    discover: bool = True
    max_bytes: int = 10 << 20  # of one answer: as much as one of our servers sends
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    stderr: Literal["pass", "keep"] = "pass"
    caller: str = ""
    clock: Clock = RealClock()
    chance: Callable[[], float] = random.random
    wrap: Callable[[Link], Link] = lambda link: link

    def __post_init__(self) -> None:
        if not self.timeout > 0:  # so that NaN is refused, too
            raise UsageError(f"timeout must be greater than 0, got {self.timeout!r}.")
        if not isinstance(self.retry, Retry):
            raise UsageError(
                f"retry must be a Retry object, got {type(self.retry).__name__}.", fix="use retry=Retry(attempts=3)"
            )
        if self.coalesce is not None and not 0 <= self.coalesce <= 1:
            raise UsageError(
                f"coalesce must be from 0 to 1, got {self.coalesce!r}.",
                "every call waits that many seconds",
                "use a short time, such as 0.002",
            )


# --- when to repeat --------------------------------------------------------------------------------------------------


def may_help(error: Exception) -> bool:
    """Return whether the same call may end otherwise the next time."""
    if isinstance(error, CallFailed) and error.status is not None:
        return error.status in _LATER
    return isinstance(error, _LOST) and not isinstance(error, Declined)


def asked_pause(error: Exception | None) -> float:
    """Return the seconds that the server asked the client to wait."""
    if isinstance(error, CallFailed):
        return error.retry_after or 0.0
    told = error.data.get("retry_after_ms") if isinstance(error, RpcError) and isinstance(error.data, dict) else None
    if not isinstance(told, int | float) or isinstance(told, bool):
        return 0.0
    return min(max(told, 0), LONGEST_WAIT * 1000) / 1000  # the bound first: a JSON number can be too large for a float


def mint_key() -> str:
    """Return a UUID of version 7 (RFC 9562, section 5.7): 48 bits of Unix time in milliseconds, the version, and chance."""
    text = ((time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(10)).hex()
    variant = "89ab"[int(text[16], 16) & 3]
    return f"{text[:8]}-{text[8:12]}-7{text[13:16]}-{variant}{text[17:20]}-{text[20:]}"


# --- delivery --------------------------------------------------------------------------------------------------------


class Dialect:
    """What a client and its server say to each other beyond JSON-RPC 2.0: by itself nothing, and no call is repeated."""

    delivery: "Delivery"  # sets itself
    has_rounds = False  # an entry that was answered may have to be sent again (`goes_on`)

    async def begin(self) -> None:
        """Agree with the server on how to speak. The link is open."""

    async def end(self) -> None:
        """Stop. The link is still open."""

    def check(self, entry: AnyEntry) -> None:
        """Raise UsageError for an entry that the dialect cannot carry."""

    async def prepare(self, entry: AnyEntry) -> None:
        """Decide on the key of an entry and on whether it may be repeated (`safe`), before the first attempt.

        An entry that is not to be sent is settled afterwards.
        """

    def params(self, entry: AnyEntry) -> Any:
        """Return the params as they travel; UNSET for none."""
        return UNSET if entry.params is None else entry.params

    def read(self, entry: AnyEntry) -> Any:
        """Return the result of an entry that was answered, as its `type`. One that does not fit is a bad answer."""
        try:
            return decode_value(entry.raw) if entry.type is None else wanted(entry.type).read(entry.raw)
        except UNREADABLE as error:
            raise BadAnswer(f"{entry.method}: the result is not as expected: {error}", ran="yes") from None

    async def only_reads(self, entry: AnyEntry) -> bool:
        """Return whether an entry that may be repeated is a query."""
        return entry.key is None or entry.query is True

    async def goes_on(self, entry: AnyEntry) -> bool:
        """Return whether an entry without a result is to be sent again: a call of several rounds."""
        return False

    def ended(self, entry: AnyEntry) -> None:
        """Called when an entry is settled, or its caller has stopped waiting."""

    async def try_arrays(self) -> None:
        """Find out whether the server takes arrays, if it may be one that drops them."""


class Outgoing(Struct, frozen=True, gc=False, tag_field="jsonrpc", tag="2.0"):
    """A request or notification as it travels."""

    method: str
    params: Any = UNSET
    id: Any = UNSET


class Delivery:
    """Entries on one link, until they are settled."""

    def __init__(self, link: Link, dialect: Dialect, options: Options) -> None:
        self.link = link
        self.options = options
        self.clock = options.clock
        self.arrays = Arrays()
        self.timeouts = Timeouts()
        self.state: Literal["new", "open", "closed"] = "new"
        self._is_local = isinstance(link, LocalLink)
        self._dialect = dialect
        dialect.delivery = self
        self._last_id = 0
        self._coalescer = None if options.coalesce is None else Coalescer(options.coalesce, self._deliver_together)

    async def open(self) -> None:
        """Open the link, and agree with the server on how to speak."""
        await self.link.open()
        self.state = "open"
        await self._dialect.begin()

    async def aclose(self) -> None:
        """Close the link. Calls in flight fail."""
        if self.state != "closed":
            await self._dialect.end()
            self.state = "closed"
            if self._coalescer is not None:
                await self._coalescer.aclose()
            await self.link.aclose()
            self.timeouts.aclose()

    def next_id(self) -> int:
        """Return the id of another request."""
        self._last_id += 1
        return self._last_id

    # --- entries -----------------------------------------------------------------------------------------------------

    async def run(self, entry: AnyEntry) -> None:
        """Settle one entry."""
        self._begin(entry)
        try:
            if not entry.is_notification:
                await self._dialect.prepare(entry)
            if entry.is_settled:
                return
            if self._coalescer is not None and entry.safe and self.arrays.legal:
                await self._coalescer.add(entry, self.arrays.chunk)
            else:
                await self.deliver([entry])
        finally:
            self._dialect.ended(entry)

    async def run_together(self, entries: list[AnyEntry]) -> tuple[Wire, str]:
        """Settle all entries, in arrays where that is legal; return how they went, and why so."""
        for entry in entries:
            self._begin(entry)
        try:
            for entry in entries:
                if not entry.is_notification:
                    await self._dialect.prepare(entry)
            left = [entry for entry in entries if not entry.is_settled]
            wire = await self._deliver_together(left)
        finally:
            for entry in entries:
                self._dialect.ended(entry)
        return wire, self.arrays.reason if len(left) > 1 else "there is one entry" if left else "nothing was sent"

    def _begin(self, entry: AnyEntry) -> None:
        if self.state == "new":
            raise UsageError("The client is not open.", fix="async with connect(...) as client: ...")
        entry.deadline = self.clock.time() + entry.timeout

    # --- attempts ----------------------------------------------------------------------------------------------------

    async def deliver(self, entries: list[AnyEntry], *, array: bool = False) -> list[AnyEntry]:
        """Settle entries; return those that a refused array carried and that may be sent in another way."""
        returned: list[AnyEntry] = []
        left = entries
        while left:
            exchange = await self._attempt(left, array)
            if len(left) == 1 and left[0].error is None and left[0].waiter is None:
                if left is entries and left[0].is_settled:
                    return returned  # the straight way
                break
            if exchange is not None and self.arrays.learn(exchange):
                returned = exchange.entries
                break
            left = await self._repeated(left)
        if self._dialect.has_rounds:
            for entry in entries:
                if not entry.ok and await self._dialect.goes_on(entry):
                    entry.attempts = 0
                    await self.deliver([entry])
        return returned

    async def _deliver_together(self, entries: list[AnyEntry]) -> Wire:
        """Settle entries in arrays as large as the server takes them, and the rest alone; return how they went."""
        is_alone = len(entries) < 2
        if not is_alone:
            await self._dialect.try_arrays()
        while not is_alone and self.arrays.legal and self.arrays.chunk > 1 and entries:
            size = self.arrays.chunk
            chunks = [entries[start : start + size] for start in range(0, len(entries), size)]
            returned = await side_by_side([partial(self.deliver, chunk, array=True) for chunk in chunks])
            entries = [entry for chunk in returned for entry in chunk]
        await side_by_side([partial(self.deliver, [entry]) for entry in entries])
        return "singles" if is_alone or entries else "array"

    async def _attempt(self, entries: list[AnyEntry], array: bool) -> Exchange | None:
        """Send one message and take its answers: every entry is settled afterwards. Return None if nothing can be sent."""
        # 1. The message. The ids are new for every attempt.
        messages, sendable = [], []
        for entry in entries:
            try:
                if self.state == "closed":
                    raise NotSent("the client is closed")
                entry.attempts += 1
                entry.is_settled, entry.error, entry.replayed, entry.retry_after = False, None, False, 0.0
                if not entry.is_notification:
                    self._last_id = entry.id = self._last_id + 1
                params = self._dialect.params(entry)
                messages.append(encode(Outgoing(entry.method, params, UNSET if entry.is_notification else entry.id)))
                sendable.append(entry)
            except (EncodeError, NotSent) as error:
                if isinstance(error, EncodeError):
                    entry.safe = False
                    why = str(error).removeprefix("Outgoing: ")  # our own struct around the params
                    error = NotSent(f"{entry.method}: the params cannot be written as JSON: {why}")
                entry.fail(error)
                self._settled(entry)
        if not sendable:
            return None
        exchange = Exchange(make_batch(messages) if array else messages[0], sendable, array, self._settled)
        # 2. The time: the longest of the entries. Those that wait less long have timers of their own.
        now, silence = self.clock.time(), self.options.retry.silence
        # An error names the time of the call, of which earlier attempts have taken a part, or that of a silent attempt.
        left, given = sendable[0].deadline - now, sendable[0].timeout
        if len(sendable) > 1:
            left, given = max(entry.deadline for entry in sendable) - now, max(entry.timeout for entry in sendable)
        if silence is not None and silence < left and all(entry.safe for entry in sendable):
            left = given = silence
        left = max(left, 0.0)
        timers: list[asyncio.TimerHandle] = []
        if len(entries) > 1:
            loop = asyncio.get_running_loop()

            def expire(entry: AnyEntry, known: float = 0.0) -> None:
                if (stood := exchange.stood_still) > known:  # a person acted meanwhile
                    timers.append(loop.call_later(stood - known, expire, entry, stood))
                    return
                exchange.give_up(entry.id, timed_out(exchange, entry.timeout))
                if exchange.is_done and exchange.limit is not None:
                    exchange.limit.expire()

            timers = [
                loop.call_later(entry.deadline - now, expire, entry)
                for entry in exchange.open.values()
                if entry.deadline - now < left - LEAST
            ]
        # 3. There and back.
        try:
            await self.carry(exchange, left, self.link.exchange, given)
        finally:
            for timer in timers:
                timer.cancel()
        return exchange

    async def carry(
        self,
        exchange: Exchange,
        seconds: float,
        send: Callable[[Exchange], Awaitable[object]],
        given: float | None = None,
    ) -> None:
        """Send one message, and take its answers for so many seconds. Every entry in it is settled afterwards.

        If the time runs out, the error names `given` seconds, or else these.
        """
        try:
            is_done, sending, left = False, send(exchange), seconds
            if self._is_local:  # most calls of an app in memory are answered without a wait, and need no timer
                begun = self.clock.time()
                is_done, sending = first_step(sending)
                left = seconds if is_done else max(begun + seconds - self.clock.time(), 0.0)
            if not is_done:
                with self.timeouts.within(left) as exchange.limit:
                    await sending
            exchange.end_of_answers()
        except CallFailed as error:
            if isinstance(error, ConnectionLost):
                for entry in exchange.open.values():
                    entry.deaths = (*entry.deaths, exchange.begun)
            exchange.end(error)
        except TimeoutError:
            exchange.end(timed_out(exchange, seconds if given is None else given))

    # --- again, or not -----------------------------------------------------------------------------------------------

    async def _repeated(self, entries: list[AnyEntry]) -> list[AnyEntry]:
        """Return the entries that are to be sent again, after the pause before that; the others are settled for good."""
        now = self.clock.time()
        asked = {entry: max(entry.retry_after, asked_pause(entry.error)) for entry in entries if self._may_repeat(entry)}
        # An entry whose server asks for a longer wait than its deadline allows does not hold up the others.
        again = [entry for entry, pause in asked.items() if now + pause < entry.deadline]
        # A query that ends the server process must not be sent to one worker after another.
        for entry in [entry for entry in again if len(set(entry.deaths)) < len(entry.deaths)]:
            if isinstance(entry.error, ConnectionLost) and await self._dialect.only_reads(entry):
                why = "two connections were lost in the same way, so this query is not sent again"
                entry.fail(ConnectionLost(f"{entry.method}: {why}: {entry.error}"))
                again.remove(entry)
        pause = 0.0
        if again:
            attempt, longest = max(entry.attempts for entry in again), max(asked[entry] for entry in again)
            pause = self.options.retry.pause(attempt, longest, self.options.chance())
        in_time = [entry for entry in again if self.clock.time() + pause < entry.deadline]
        for entry in entries:
            if entry not in in_time:
                self._finish(entry)
        if in_time:
            await self.clock.sleep(pause)
        return in_time

    def _may_repeat(self, entry: AnyEntry) -> bool:
        """Return whether a settled entry is to be sent again, if the pause before that leaves time."""
        error = entry.error
        if error is None:
            return False
        is_lost = entry.attempts > 0 and isinstance(error, CallFailed | RpcError) and error.ran == "unknown"
        entry.unclear = entry.unclear or is_lost
        may_go = entry.safe and self.state == "open" and entry.attempts < self.options.retry.attempts
        return may_go and may_help(error) and self.clock.time() < entry.deadline - LEAST

    def _settled(self, entry: AnyEntry) -> None:
        """Wake a caller that waits for this entry alone: it need not wait for the others of its message."""
        if entry.waiter is not None and not self._may_repeat(entry):
            self._finish(entry)

    @staticmethod
    def _finish(entry: AnyEntry) -> None:
        """Settle an entry for good. If an earlier attempt may have run, a refusal of the last one does not say "no"."""
        error = entry.error
        if entry.unclear and isinstance(error, CallFailed | RpcError) and error.ran == "no":
            if isinstance(error, CallFailed):
                entry.fail(ConnectionLost(f"an attempt was lost, and the last one failed: {error}", status=error.status))
            else:
                error.ran = "unknown"
        if entry.waiter is not None:
            wake(entry.waiter, None)


def timed_out(exchange: Exchange, seconds: float) -> CallFailed:
    """Return the error of a message that was not answered within so many seconds."""
    if not exchange.sent:
        return NotSent(f"the server could not be reached within {round(seconds, 2):g} s")
    return TimedOut(f"no answer within {round(seconds, 2):g} s{exchange.instead}")


async def side_by_side(work: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Return the outcomes of all, `AT_ONCE` at a time."""
    if len(work) == 1:
        return [await work[0]()]
    places = asyncio.Semaphore(AT_ONCE)

    async def one(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with places:
            return await begin()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(begin)) for begin in work]
    return [task.result() for task in tasks]


# --- coalescing ------------------------------------------------------------------------------------------------------


class Coalescer:
    """Collects entries for up to `window` seconds, and sends them together (B4).

    Each caller is woken by its own answer, not by the last one. When a caller gives up, the others go on.
    """

    def __init__(self, window: float, send: Callable[[list[AnyEntry]], Awaitable[object]]) -> None:
        self._window = window
        self._send = send
        self._waiting: list[AnyEntry] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def add(self, entry: AnyEntry, most: int) -> None:
        """Send an entry together with others, `most` of them at once, and return when it is settled."""
        loop = asyncio.get_running_loop()
        entry.waiter = loop.create_future()
        self._waiting.append(entry)
        if len(self._waiting) >= most:
            self._leave()
        elif self._timer is None:
            self._timer = loop.call_later(self._window, self._leave)
        await entry.waiter

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        entries, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._carry(entries))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _carry(self, entries: list[AnyEntry]) -> None:
        try:
            await self._send(entries)
        finally:  # no caller is left waiting, also if this is cancelled
            for entry in entries:
                if not entry.is_settled:
                    entry.fail(ConnectionLost("the client was closed"))
                wake(entry.waiter, None)

    async def aclose(self) -> None:
        """Send what waits; it will find the client closed. Wait for what is in flight to notice."""
        if self._waiting:
            self._leave()
        await cancel_all(*self._sending)
