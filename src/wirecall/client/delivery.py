"""`Delivery`: the half of a client that sends entries until each is settled.

    _deliver (attempts) -> _attempt (one exchange on the link) -> _again, after a pause, or settled

The rules of the file:

1. Every entry is settled by its deadline, and with exactly one of: a result; `NotSent`; refused (`ran == "no"`); ran, with
   the error; unknown (`ran == "unknown"`).
2. "It has not run" is said of all attempts. After one that was lost, the refusal of the next says nothing about the first.
3. The straight way costs no task: an entry that goes alone is delivered in its caller's.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET, Struct

from wirecall.client.exchange import Arrays, Entry, Exchange
from wirecall.client.options import Options
from wirecall.client.retries import asked_pause, may_help
from wirecall.errors import CallFailed, ConnectionLost, EncodeError, NotSent, TimedOut, UsageError
from wirecall.jsonrpc import make_batch
from wirecall.protocol import messages as frames

if TYPE_CHECKING:
    from wirecall.client.links import Link

T = TypeVar("T")

LEAST = 0.001  # seconds that an attempt needs at the very least
AT_ONCE = 32  # entries of a batch that leave as single requests at the same time


class _Call(Struct, frozen=True, gc=False, tag_field="jsonrpc", tag="2.0"):
    method: str
    params: Any = UNSET
    id: Any = UNSET


class Delivery:
    """Entries on one link, until they are settled. `Client` says what they carry, and which of them are `safe`."""

    def __init__(self, link: "Link", options: Options) -> None:
        self.arrays = Arrays()
        self._link = link
        self._options = options
        self._clock = options.clock
        self._last_id = 0
        self._state = "new"  # then "open", then "closed"

    def _params(self, entry: Entry) -> Any:
        """The params as they travel; UNSET for none."""
        raise NotImplementedError

    async def _only_reads(self, entry: Entry) -> bool:
        """Return whether an entry that may be repeated is a query: those of commands have a key."""
        return entry.key is None or entry.query is True

    def _begin(self, entry: Entry) -> None:
        """From now on its time passes."""
        if self._state == "new":
            raise UsageError("The client is not open.", fix="async with connect(...) as client: ...")
        entry.deadline = self._clock.time() + entry.timeout

    # --- attempts ----------------------------------------------------------------------------------------------------

    async def _deliver(self, entries: list[Entry], *, array: bool = False) -> list[Entry]:
        """Settle entries by as many attempts as it takes; gives those back that a refused array carried."""
        while entries:
            exchange = await self._attempt(entries, array)
            if exchange is not None and exchange.array and exchange.is_refused and self._learns(exchange):
                return exchange.entries
            entries = await self._repeated(entries)
        return []

    async def _repeated(self, entries: list[Entry]) -> list[Entry]:
        """Those of the entries that are to be sent again, when it is time."""
        if len(entries) == 1 and entries[0].error is None and entries[0].waiter is None:
            return []  # the straight way
        now = self._clock.time()
        # One entry whose server asks for a longer wait than its deadline allows does not hold up the others.
        again = [entry for entry in entries if self._again(entry) and now + self._asked(entry) < entry.deadline]
        # A query that ends the server process must not be sent to one worker after another.
        for entry in [entry for entry in again if len(set(entry.deaths)) < len(entry.deaths)]:
            if isinstance(entry.error, ConnectionLost) and await self._only_reads(entry):
                why = "two connections were lost in the same way, so this query is not sent again"
                entry.fail(ConnectionLost(f"{entry.method}: {why}: {entry.error}"))
                again.remove(entry)
        pause = self._pause(again) if again else 0.0
        in_time = [entry for entry in again if self._clock.time() + pause < entry.deadline]
        for entry in entries:
            if entry not in in_time:
                self._put_straight(entry)
                self._wake(entry)
        if in_time:
            await self._clock.sleep(pause)
        return in_time

    def _learns(self, exchange: Exchange) -> bool:
        return self.arrays.learn(exchange.entries[0].error, len(exchange.entries))

    async def _deliver_arrays(self, entries: list[Entry]) -> list[Entry]:
        """Arrays, as large as the server takes them; gives the entries back that must go alone."""
        while self.arrays.legal and self.arrays.chunk > 1 and entries:
            size = self.arrays.chunk
            chunks = [entries[start : start + size] for start in range(0, len(entries), size)]
            returned = await side_by_side([partial(self._deliver, chunk, array=True) for chunk in chunks])
            entries = [entry for chunk in returned for entry in chunk]
        return entries

    async def _deliver_together(self, entries: list[Entry]) -> None:
        left = await self._deliver_arrays(entries) if len(entries) > 1 else entries
        await side_by_side([partial(self._deliver, [entry]) for entry in left])

    async def _attempt(self, entries: list[Entry], array: bool) -> Exchange | None:
        """One message there and its answers back. Every entry is settled afterwards."""
        exchange = self._exchange(entries, array)
        if exchange is None:
            return None
        left = self._time_left(exchange.entries)
        timers = self._timers(exchange, left) if len(entries) > 1 else ()
        try:
            async with asyncio.timeout(left):
                await self._link.exchange(exchange)
            exchange.end_of_answers()
        except CallFailed as error:
            if isinstance(error, ConnectionLost):
                for entry in exchange.open.values():
                    entry.deaths = (*entry.deaths, exchange.begun)
            exchange.end(error)
        except TimeoutError:
            exchange.end(self._timed_out(exchange, left))
        finally:
            for timer in timers:
                timer.cancel()
        return exchange

    def _exchange(self, entries: list[Entry], array: bool) -> Exchange | None:
        """The message of an attempt; None if nothing in it can be sent."""
        messages, sendable = [], []
        for entry in entries:
            try:
                messages.append(self._encoded(entry))
                sendable.append(entry)
            except EncodeError as error:
                entry.safe = False
                entry.fail(NotSent(f"{entry.method}: the params cannot be written as JSON: {error}"))
                self._settled(entry)
            except NotSent as error:
                entry.fail(error)
                self._settled(entry)
        if not sendable:
            return None
        return Exchange(make_batch(messages) if array else messages[0], sendable, array, self._settled)

    def _encoded(self, entry: Entry) -> bytes:
        if self._state == "closed":
            raise NotSent("the client is closed")
        entry.attempts += 1
        entry.is_settled, entry.error, entry.replayed, entry.retry_after = False, None, False, 0.0
        if entry.is_notification:
            return frames.encode(_Call(entry.method, self._params(entry)))
        self._last_id = entry.id = self._last_id + 1
        return frames.encode(_Call(entry.method, self._params(entry), entry.id))

    def _time_left(self, entries: Sequence[Entry]) -> float:
        latest = entries[0].deadline if len(entries) == 1 else max(entry.deadline for entry in entries)
        left = latest - self._clock.time()
        silence = self._options.retry.silence
        if silence is not None and all(entry.safe for entry in entries):
            left = min(left, silence)
        return max(left, 0.0)

    def _timers(self, exchange: Exchange, longest: float) -> list[asyncio.TimerHandle]:
        """For the entries that will wait less long than the longest one."""
        loop, now = asyncio.get_running_loop(), self._clock.time()
        waits = [(entry, entry.deadline - now) for entry in exchange.open.values()]
        return [
            loop.call_later(wait, partial(self._expire, exchange, entry.id, entry.timeout))
            for entry, wait in waits
            if wait < longest - LEAST
        ]

    def _expire(self, exchange: Exchange, id: int, timeout: float) -> None:
        exchange.give_up(id, self._timed_out(exchange, timeout))

    @staticmethod
    def _timed_out(exchange: Exchange, seconds: float) -> CallFailed:
        if not exchange.sent:
            return NotSent(f"the server could not be reached within {round(seconds, 2):g} s")
        instead = f"; it sent {exchange.strays[0]}" if exchange.strays else ""
        return TimedOut(f"no answer within {round(seconds, 2):g} s{instead}")

    # --- again, or not -----------------------------------------------------------------------------------------------

    def _settled(self, entry: Entry) -> None:
        """Whoever waits for this entry alone need not wait for the others of its message."""
        if entry.waiter is not None and not self._again(entry):
            self._put_straight(entry)
            self._wake(entry)

    def _wake(self, entry: Entry) -> None:
        if entry.waiter is not None and not entry.waiter.done():
            entry.waiter.set_result(None)

    def _again(self, entry: Entry) -> bool:
        """Whether a settled entry is to be sent again, if the pause before that leaves time."""
        error: Any = entry.error
        if error is None:
            return False
        is_lost = entry.attempts > 0 and getattr(error, "ran", "unknown") == "unknown"
        entry.unclear = entry.unclear or is_lost
        may_go = entry.safe and self._state == "open" and entry.attempts < self._options.retry.attempts
        return may_go and may_help(error) and self._clock.time() < entry.deadline - LEAST

    @staticmethod
    def _put_straight(entry: Entry) -> None:
        """An earlier attempt may have run, whatever became of the last one."""
        error: Any = entry.error
        if error is None or not entry.unclear or error.ran != "no":
            return
        if isinstance(error, CallFailed):
            entry.fail(ConnectionLost(f"an attempt was lost, and the last one failed: {error}", status=error.status))
        else:
            error.ran = "unknown"

    @staticmethod
    def _asked(entry: Entry) -> float:
        return max(entry.retry_after, 0.0 if entry.error is None else asked_pause(entry.error))

    def _pause(self, entries: list[Entry]) -> float:
        asked = max(self._asked(entry) for entry in entries)
        attempt = max(entry.attempts for entry in entries)
        return self._options.retry.pause(attempt, asked, self._options.chance())


async def side_by_side(work: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """The outcomes of all, `AT_ONCE` at a time."""
    if len(work) == 1:
        return [await work[0]()]
    places = asyncio.Semaphore(AT_ONCE)

    async def one(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with places:
            return await begin()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(begin)) for begin in work]
    return [task.result() for task in tasks]
