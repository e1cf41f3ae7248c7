"""`Delivery`: sends entries on one link until each of them is settled.

    deliver -> attempts (one exchange on the link each), with pauses between them -> rounds that the
    dialect requests

1. Every entry is settled by its deadline, and with exactly one of: a result; `NotSent`; refused
   (`ran == "no"`); ran, with the error; unknown (`ran == "unknown"`).
2. A call is repeated only if it is safe to repeat (`Entry.safe`: it only reads, or it has an
   idempotency key) and if that may help: the server was not reached, the answer was lost, or the
   server asks for a retry.
3. Between attempts the client waits a random time of up to `first` seconds, doubled each time, up
   to `cap` (full jitter), and never less than the server asked for. No attempt begins after the
   deadline of the call.
4. `ran == "no"` covers all attempts. After a lost attempt, the refusal of the next one proves
   nothing about the first.
5. A single entry is delivered in its caller's task: the fast path starts no task.
"""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.aio import Timeouts, cancel_all, first_step, wake
from wirecall.client.exchange import (
    AnyEntry,
    Arrays,
    Exchange,
    Link,
    LocalLink,
    StreamCut,
    Wire,
    refuses_batch,
)
from wirecall.client.refs import has_refs
from wirecall.errors import (
    AuditUnavailable,
    BadAnswer,
    Busy,
    CallFailed,
    ConnectionLost,
    Declined,
    DependencyFailed,
    EncodeError,
    KeyInProgress,
    LedgerUnavailable,
    NotSent,
    OutcomeUnknown,
    ReferenceInvalid,
    ReferencesOff,
    ResponseTooLarge,
    RpcError,
    TimedOut,
    UsageError,
    WirecallError,
)
from wirecall.jsonrpc import make_batch
from wirecall.protocol.messages import UNREADABLE, decode_value, encode
from wirecall.protocol.models import wanted
from wirecall.transports.sse import LONGEST_WAIT

if TYPE_CHECKING:
    from wirecall.auth.client import Credentials
    from wirecall.server.references import ReferenceLimits

T = TypeVar("T")

decode_members = msgspec.json.Decoder(dict[str, Raw]).decode

LEAST = 0.001  # min seconds for an attempt
AT_ONCE = 32  # max entries of a batch sent as single requests at the same time
DOUBLINGS = 60  # max doublings of a pause; a float has room for 1023

# Temporary refusals of proxies and servers. Any other status would be the same the next time.
_LATER = frozenset({429, 502, 503, 504})
# BadAnswer is missing: a server that sends garbage once will do so again.
_LOST = (
    NotSent,
    ConnectionLost,
    TimedOut,
    KeyInProgress,
    Busy,
    LedgerUnavailable,
    AuditUnavailable,
    ResponseTooLarge,
)


# --- options --------------------------------------------------------------------------------------


class Clock(Protocol):
    """The time between attempts, for tests to replace."""

    def time(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The system's monotonic clock."""

    time = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)


class Retry(Struct, frozen=True, kw_only=True):
    """How a call that may be repeated is repeated.

    `attempts` is the largest number of attempts, `first` the seconds before the second one, and
    `cap` the most seconds between two. The pause doubles each time.

    >>> client = connect(app, retry=Retry(attempts=3, first=0.05))
    """

    attempts: int = 8
    first: float = 0.1
    cap: float = 10.0
    # An attempt without an answer for so many seconds is lost; None: timeout.
    silence: float | None = None

    def __post_init__(self) -> None:
        if (
            self.attempts < 1
            or not 0 <= self.first <= self.cap
            or (self.silence is not None and not self.silence > 0)
        ):
            raise UsageError(
                f"{self!r} cannot be followed.", fix="attempts >= 1, 0 <= first <= cap, silence > 0"
            )

    def pause(self, attempt: int, asked: float, chance: float) -> float:
        """Return the seconds between attempt number `attempt` and the next.

        `chance` is a random number from 0 to 1.
        """
        return max(asked, chance * min(self.cap, self.first * 2.0 ** min(attempt - 1, DOUBLINGS)))


class Options(Struct, kw_only=True):
    """The options of every client; `connect` explains each of them."""

    timeout: float = 30.0
    retry: Retry = Retry()
    headers: Mapping[str, str] = {}
    auth: "Credentials | None" = None
    coalesce: float | None = None
    discover: bool = True
    # The largest answer that the client reads. Our servers send at most this.
    max_bytes: int = 10 << 20
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    stderr: Literal["pass", "keep"] = "pass"
    caller: str = ""
    framing: Literal["lines", "content-length"] = "lines"
    clock: Clock = RealClock()
    chance: Callable[[], float] = random.random
    wrap: Callable[[Link], Link] = lambda link: link

    def __post_init__(self) -> None:
        if not self.timeout > 0:  # refuses NaN, too
            raise UsageError(f"timeout must be greater than 0, got {self.timeout!r}.")
        if not isinstance(self.retry, Retry):
            raise UsageError(
                f"retry must be a Retry object, got {type(self.retry).__name__}.",
                fix="use retry=Retry(attempts=3)",
            )
        if self.coalesce is not None and not 0 <= self.coalesce <= 1:
            raise UsageError(
                f"coalesce must be from 0 to 1, got {self.coalesce!r}.",
                "every call waits that many seconds",
                "use a short time, such as 0.002",
            )


# --- when to repeat -------------------------------------------------------------------------------


def may_help(error: Exception) -> bool:
    """Return whether the same call may have another outcome the next time."""
    if isinstance(error, CallFailed) and error.status is not None:
        return error.status in _LATER
    return isinstance(error, _LOST) and not isinstance(error, Declined)


def asked_pause(error: Exception | None) -> float:
    """Return the seconds that the server asked the client to wait."""
    if isinstance(error, CallFailed):
        return error.retry_after or 0.0
    if not isinstance(error, RpcError) or not isinstance(error.data, dict):
        return 0.0
    asked = error.data.get("retry_after_ms")
    if not isinstance(asked, int | float) or isinstance(asked, bool):
        return 0.0
    # Limit it first: the number may not fit a float.
    return min(max(asked, 0), LONGEST_WAIT * 1000) / 1000


def mint_key() -> str:
    """Return a UUID of version 7: 48 bits of Unix milliseconds, then random bits.

    RFC 9562, section 5.7, defines it.
    """
    text = ((time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(10)).hex()
    variant = "89ab"[int(text[16], 16) & 3]
    return f"{text[:8]}-{text[8:12]}-7{text[13:16]}-{variant}{text[17:20]}-{text[20:]}"


# --- delivery -------------------------------------------------------------------------------------


class Dialect:
    """A protocol on top of JSON-RPC 2.0. This base class adds nothing, and repeats no call."""

    # Set by the Delivery.
    delivery: "Delivery"
    # An entry that was answered may have to be sent again (`next_round`).
    has_rounds = False

    async def begin(self) -> None:
        """Negotiate the protocol with the server. The link is open."""

    async def end(self) -> None:
        """Stop. The link is still open."""

    def check(self, entry: AnyEntry) -> None:
        """Raise UsageError for an entry that the dialect cannot carry."""

    async def prepare(self, entry: AnyEntry) -> None:
        """Decide on the key of an entry, and whether it may be repeated (`safe`).

        This happens before the first attempt. An entry that must not be sent is settled afterwards.
        """

    def params(self, entry: AnyEntry) -> Any:
        """Return the params as they are sent; UNSET for none."""
        return UNSET if entry.params is None else entry.params

    def read(self, entry: AnyEntry) -> Any:
        """Return the result of an answered entry as its `type`.

        One that does not fit is a bad answer.
        """
        try:
            if entry.type is None:
                return decode_value(entry.raw)
            return wanted(entry.type).read(entry.raw)
        except UNREADABLE as error:
            raise BadAnswer(
                f"{entry.method}: the result is not as expected: {error}", ran="yes"
            ) from None

    async def only_reads(self, entry: AnyEntry) -> bool:
        """Return whether an entry that may be repeated is a query."""
        return entry.key is None or entry.query is True

    async def next_round(self, entry: AnyEntry) -> bool:
        """Prepare another round of an entry without a result; return whether to send it again."""
        return False

    def ended(self, entry: AnyEntry) -> None:
        """Called when an entry is settled, or its caller has stopped waiting."""

    async def try_arrays(self, entries: Sequence[AnyEntry]) -> None:
        """Find out whether the server accepts arrays, and how large they may be."""

    # --- references: see `linked` -----------------------------------------------------------------

    # `prepare` shows the params to a person, so their references must be filled before.
    shows_params = False

    async def reference_limits(self, timeout: float) -> "ReferenceLimits | None":
        """Return the limits of a server that resolves references in arrays, None for any other."""
        return None

    def forget_references(self) -> None:
        """Note that the server does not resolve references any more."""

    def linked(self, entry: AnyEntry) -> Any:
        """Return the message of an entry with references, as an array carries it (R1)."""
        assert entry.links is not None
        refs: Any = UNSET
        if entry.links.refs:
            refs = {
                place: {"id": target.id, "path": path} for place, target, path in entry.links.refs
            }
        after: Any = UNSET
        if entry.links.after:
            after = [target.id for target in entry.links.after]
        return Linked(entry.method, self.params(entry), entry.id, refs, after)

    def referred(self, entry: AnyEntry, path: tuple[str, ...]) -> bytes:
        """Return the result that a reference with this path points into, as JSON."""
        return bytes(entry.raw)

    def failure(self, entry: AnyEntry) -> WirecallError | None:
        """Return the error that makes the dependants of an entry fail.

        A result that does not fit the `type` of its caller is still the result.
        """
        if isinstance(entry.error, BadAnswer) and entry.error.ran == "yes":
            return None
        return entry.error

    def filled(self, params: bytes) -> Any:
        """Return params whose references are filled."""
        return decode_members(params)


class Outgoing(Struct, frozen=True, gc=False, tag_field="jsonrpc", tag="2.0"):
    """A request or notification as it is sent."""

    method: str
    params: Any = UNSET
    id: Any = UNSET


class Linked(Outgoing, frozen=True, gc=False):
    """A request with references to earlier ones of its array."""

    refs: Any = UNSET
    after: Any = UNSET


class Delivery:
    """Sends entries on one link until they are settled."""

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
        self._coalescer: Coalescer | None = None
        if options.coalesce is not None:
            self._coalescer = Coalescer(options.coalesce, self.deliver_together)

    async def open(self) -> None:
        """Open the link, and negotiate the protocol with the server."""
        await self.link.open()
        self.state = "open"
        await self._dialect.begin()

    async def aclose(self) -> None:
        """Close the link, even if this is cancelled. Calls in flight fail."""
        if self.state == "closed":
            return
        try:
            try:
                await self._dialect.end()
            finally:
                self.state = "closed"
                if self._coalescer is not None:
                    await self._coalescer.aclose()
        finally:
            try:
                await self.link.aclose()
            finally:
                self.timeouts.aclose()

    def next_id(self) -> int:
        """Return the id for the next request."""
        self._last_id += 1
        return self._last_id

    # --- entries ----------------------------------------------------------------------------------

    async def run(self, entry: AnyEntry) -> None:
        """Settle one entry."""
        self.begin(entry)
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
        """Settle all entries, in arrays if that is legal; return how they were sent, and why."""
        for entry in entries:
            self.begin(entry)
        try:
            for entry in entries:
                if not entry.is_notification:
                    await self._dialect.prepare(entry)
            left = [entry for entry in entries if not entry.is_settled]
            wire = await self.deliver_together(left)
        finally:
            for entry in entries:
                self._dialect.ended(entry)
        if len(left) > 1:
            return wire, self.arrays.reason
        if left:
            return wire, "there is one entry"
        return wire, "nothing was sent"

    def begin(self, entry: AnyEntry) -> None:
        if self.state == "new":
            raise UsageError(
                "The client is not open.", fix="async with connect(...) as client: ..."
            )
        entry.deadline = self.clock.time() + entry.timeout

    # --- attempts ---------------------------------------------------------------------------------

    async def deliver(self, entries: list[AnyEntry], *, array: bool = False) -> list[AnyEntry]:
        """Settle entries; return those of a refused array that may be sent differently."""
        returned: list[AnyEntry] = []
        left = entries
        while left:
            exchange = await self.attempt(left, array)
            if len(left) == 1 and left[0].error is None and left[0].waiter is None:
                if left is entries and left[0].is_settled:
                    return returned  # the fast path
                break
            if exchange is not None and self.arrays.learn(exchange):
                returned = exchange.entries
                break
            left = await self.repeated(left)
        if self._dialect.has_rounds:
            for entry in entries:
                if not entry.ok and await self._dialect.next_round(entry):
                    entry.attempts = 0
                    await self.deliver([entry])
                if entry.waiter is not None:
                    wake(entry.waiter, None)
        return returned

    async def deliver_together(self, entries: list[AnyEntry]) -> Wire:
        """Settle entries in the largest accepted arrays, the rest alone; return how."""
        is_alone = len(entries) < 2
        if not is_alone:
            await self._dialect.try_arrays(entries)
        taken = 0
        left = entries
        while not is_alone and self.arrays.legal and self.arrays.chunk > 1 and left:
            chunks = self.arrays.split(left, partial(self._size, self._last_id + len(left)))
            # Send arrays that may contain a command one after another, in the order of their
            # entries.
            in_turn = [chunk for chunk in chunks if not all(map(changes_nothing, chunk))]
            reading = [[chunk] for chunk in chunks if all(map(changes_nothing, chunk))]
            outcomes = await side_by_side(
                [partial(self._in_turn, work) for work in (in_turn, *reading) if work]
            )
            taken += sum(number for number, _ in outcomes)
            returned = {entry for _, refused in outcomes for entry in refused}
            left = [entry for entry in left if entry in returned]
        await side_by_side([partial(self.deliver, [entry]) for entry in left])
        if is_alone or left:
            return "singles"
        form = "array"
        if entries[0].wants_stream and any(entry.was_streamed for entry in entries):
            form = "stream"
        if taken < 2:
            return form
        return f"{form}s({taken})"

    async def _in_turn(self, chunks: list[list[AnyEntry]]) -> tuple[int, list[AnyEntry]]:
        """Deliver arrays one after another.

        Return how many the server accepted, and the remaining entries. A refusal ends this: the
        server might accept a later, smaller array before the commands that precede it.
        """
        for number, chunk in enumerate(chunks):
            refused = await self.deliver(chunk, array=True)
            if refused:
                return number, [*refused, *chain.from_iterable(chunks[number + 1 :])]
        return len(chunks), []

    def _size(self, id: int, entry: AnyEntry) -> int:
        """Return the length of an entry with this id, in bytes."""
        given: Any = id
        if entry.is_notification:
            given = UNSET
        try:
            return len(encode(Outgoing(entry.method, self._dialect.params(entry), given)))
        except EncodeError:
            return 0  # it will not be sent

    async def attempt(self, entries: list[AnyEntry], array: bool) -> Exchange | None:
        """Send one message and take its answers, which settles every entry.

        None: nothing can be sent.
        """
        # 1. The message. The ids are new for every attempt.
        messages = []
        sendable = []
        for entry in entries:
            try:
                if self.state == "closed":
                    raise NotSent("the client is closed")
                entry.attempts += 1
                entry.is_settled = False
                entry.error = None
                entry.replayed = False
                entry.retry_after = 0.0
                id: Any = UNSET
                if not entry.is_notification:
                    self._last_id = id = entry.id = self._last_id + 1
                if entry.links is not None:
                    messages.append(encode(self._dialect.linked(entry)))
                else:
                    params = self._dialect.params(entry)
                    messages.append(encode(Outgoing(entry.method, params, id)))
                sendable.append(entry)
            except NotSent as error:
                entry.fail(error)
                self._settled(entry)
            except EncodeError as error:
                entry.safe = False
                entry.fail(unwritable(entry, error))
                self._settled(entry)
        if not sendable:
            return None
        data = messages[0]
        if array:
            data = make_batch(messages)
        exchange = Exchange(data, sendable, array, self._settled)
        if array and sendable[0].wants_stream:
            exchange.wants_stream = True
        # 2. The time limit: the longest of the entries. Entries with a shorter one have separate
        #    timers.
        now = self.clock.time()
        silence = self.options.retry.silence
        # An error names the timeout of the call, which earlier attempts have partly used, or that
        # of a silent attempt.
        left = sendable[0].deadline - now
        given = sendable[0].timeout
        if len(sendable) > 1:
            left = max(entry.deadline for entry in sendable) - now
            given = max(entry.timeout for entry in sendable)
        if silence is not None and silence < left and all(entry.safe for entry in sendable):
            exchange.silence = silence
            exchange.latest = asyncio.get_running_loop().time() + left
            left = given = silence
        left = max(left, 0.0)
        timers: list[asyncio.TimerHandle] = []
        if len(entries) > 1:
            timers = _start_timers(exchange, now, left)
        # 3. Send, and take the answers.
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
        """Send one message, and take its answers for so many seconds.

        Every entry in it is settled afterwards.

        If the time runs out, the error names `given` seconds, by default `seconds`.
        """
        try:
            is_done = False
            sending = send(exchange)
            left = seconds
            # An app in memory answers most calls without a wait: they need no timer.
            if self._is_local:
                begun = self.clock.time()
                is_done, sending = first_step(sending)
                if not is_done:
                    left = max(begun + seconds - self.clock.time(), 0.0)
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

    # --- again, or not ----------------------------------------------------------------------------

    async def repeated(self, entries: list[AnyEntry]) -> list[AnyEntry]:
        """Settle entries for good, except those to send again; return these after a pause."""
        for entry in entries:
            note_loss(entry)
        now = self.clock.time()
        asked = {
            entry: max(entry.retry_after, asked_pause(entry.error))
            for entry in entries
            if self.may_repeat(entry)
        }
        # An entry whose server asks for a longer wait than its deadline allows does not delay the
        # others.
        again = [entry for entry, pause in asked.items() if now + pause < entry.deadline]
        # A query that crashes the server process must not be sent to one worker after another.
        for entry in [entry for entry in again if len(set(entry.deaths)) < len(entry.deaths)]:
            if isinstance(entry.error, ConnectionLost) and await self._dialect.only_reads(entry):
                why = "two connections were lost in the same way, so this query is not sent again"
                entry.fail(ConnectionLost(f"{entry.method}: {why}: {entry.error}"))
                again.remove(entry)
        pause = 0.0
        if again:
            attempt = max(entry.attempts for entry in again)
            longest = max(asked[entry] for entry in again)
            pause = self.options.retry.pause(attempt, longest, self.options.chance())
        in_time = [entry for entry in again if self.clock.time() + pause < entry.deadline]
        for entry in entries:
            if entry not in in_time:
                self.finish(entry)
        if in_time:
            await self.clock.sleep(pause)
        return in_time

    def may_repeat(self, entry: AnyEntry) -> bool:
        """Return whether to send a settled entry again, if the pause leaves time for it."""
        if entry.error is None:
            return False
        may_go = (
            entry.safe and self.state == "open" and entry.attempts < self.options.retry.attempts
        )
        return may_go and may_help(entry.error) and self.clock.time() < entry.deadline - LEAST

    def _settled(self, entry: AnyEntry) -> None:
        """Wake a caller that waits only for this entry, and not for others of its message."""
        if entry.waiter is None:
            return
        # `linked` decides about these at the end of the message.
        if entry.links is not None and isinstance(entry.error, (DependencyFailed, ReferencesOff)):
            return
        note_loss(entry)
        if not self.may_repeat(entry) and not refuses_batch(entry.error):
            self.finish(entry)

    def finish(self, entry: AnyEntry) -> None:
        """Settle an entry for good."""
        if entry.error is not None:
            self._settle_error(entry, entry.error)
        # Another round of an entry may follow: `deliver` wakes its caller at the end.
        if entry.waiter is not None and not self._dialect.has_rounds:
            wake(entry.waiter, None)

    @staticmethod
    def _settle_error(entry: AnyEntry, error: WirecallError) -> None:
        """Settle an entry that failed.

        If an earlier attempt may have run, a refusal does not mean "no".
        """
        if entry.unclear and isinstance(error, CallFailed | RpcError) and error.ran == "no":
            if isinstance(error, CallFailed):
                entry.fail(
                    ConnectionLost(
                        f"an attempt was lost, and the last one failed: {error}",
                        status=error.status,
                    )
                )
            else:
                error.ran = "unknown"
        elif isinstance(error, StreamCut):
            entry.fail(OutcomeUnknown(f"{entry.method}: {error}", ran="unknown"))


def _start_timers(exchange: Exchange, now: float, left: float) -> list[asyncio.TimerHandle]:
    """Start a timer for each entry whose deadline is earlier than that of its message."""
    loop = asyncio.get_running_loop()

    def expire(entry: AnyEntry, known: float = 0.0) -> None:
        if (stood := exchange.stood_still) > known:  # a person has acted since
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
    return timers


def note_loss(entry: AnyEntry) -> None:
    """Mark an entry whose attempt was lost, so that it may have run."""
    error = entry.error
    if entry.attempts > 0 and isinstance(error, CallFailed | RpcError) and error.ran == "unknown":
        entry.unclear = True


def changes_nothing(entry: AnyEntry) -> bool:
    """Return whether an entry is known to change nothing.

    The order of such entries does not matter.
    """
    return entry.safe and entry.key is None


def unwritable(entry: AnyEntry, error: EncodeError) -> WirecallError:
    """Return the error of an entry whose params cannot be written as JSON."""
    if has_refs(entry.params):
        return ReferenceInvalid(
            f"{entry.method}: the params refer to an entry of another batch; "
            "expected one of the same batch, added before this call",
            ran="no",
        )
    why = str(error).removeprefix("Outgoing: ").removeprefix("Linked: ")  # our own structs
    return NotSent(f"{entry.method}: the params cannot be written as JSON: {why}")


def timed_out(exchange: Exchange, seconds: float) -> CallFailed:
    """Return the error of a message that was not answered within so many seconds."""
    if not exchange.sent:
        return NotSent(f"the server could not be reached within {round(seconds, 2):g} s")
    return TimedOut(f"no answer within {round(seconds, 2):g} s{exchange.instead}")


async def side_by_side(work: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Run all of the work, `AT_ONCE` at a time; return the outcomes."""
    if len(work) == 1:
        return [await work[0]()]
    places = asyncio.Semaphore(AT_ONCE)

    async def one(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with places:
            return await begin()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(begin)) for begin in work]
    return [task.result() for task in tasks]


# --- coalescing -----------------------------------------------------------------------------------


class Coalescer:
    """Collects entries for up to `window` seconds, and sends them together (B4).

    Each caller wakes with its own answer, not with the last one. When a caller gives up, the others
    continue.
    """

    def __init__(self, window: float, send: Callable[[list[AnyEntry]], Awaitable[object]]) -> None:
        self._window = window
        self._send = send
        self._waiting: list[AnyEntry] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def add(self, entry: AnyEntry, most: int) -> None:
        """Send an entry together with others, at most `most`; return when it is settled."""
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
        entries = self._waiting
        self._waiting = []
        task = asyncio.get_running_loop().create_task(self._carry(entries))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _carry(self, entries: list[AnyEntry]) -> None:
        try:
            await self._send(entries)
        finally:  # wake every caller, even if this is cancelled
            for entry in entries:
                if not entry.is_settled:
                    entry.fail(ConnectionLost("the client was closed"))
                wake(entry.waiter, None)

    async def aclose(self) -> None:
        """Cancel the entries in flight; the waiting ones fail, because the client is closed."""
        if self._waiting:
            self._leave()
        await cancel_all(*self._sending)
