"""`Client`: calls, notifications and batches to one server, each with a deadline and one outcome.

    entry -> _prepare (key, safe) -> _deliver (attempts) -> _attempt (one exchange on the link) -> result or error

The rules of the file:

1. Every call ends by its deadline, and with exactly one of: a result; `NotSent`; refused (`ran == "no"`); ran, with the
   error; unknown (`ran == "unknown"`).
2. "It has not run" is said of all attempts. After one that was lost, the refusal of the next says nothing about the first.
3. The straight way costs no task: a call runs in its caller's.
4. A protocol above JSON-RPC overrides `open`, `_prepare`, `_params`, `_converted` and `arrays`, and brings its own link.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, overload

import msgspec
from msgspec import UNSET, Struct

from wirecall import frames
from wirecall.batches import Arrays, Batch, Entry, Exchange, Names, Wire
from wirecall.coalescing import Coalescer
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    EncodeError,
    KeyInvalid,
    NotSent,
    RpcError,
    TimedOut,
    UsageError,
)
from wirecall.jsonrpc import make_batch
from wirecall.links import Link
from wirecall.params import KEY
from wirecall.policy import check_key
from wirecall.retries import Clock, RealClock, Retry, asked_pause, may_help, mint_key

T = TypeVar("T")
C = TypeVar("C", bound="Client")

TIMEOUT = 30.0
MAX_BYTES = 10 << 20  # of one answer: as much as one of our servers sends
DISCOVERY = 5.0  # seconds that the question for the kinds of methods may take, and no more than half of a call's time
LEAST = 0.001  # seconds that an attempt needs at the very least
AT_ONCE = 32  # entries of a batch that leave as single requests at the same time


_BY_POSITION = (list, tuple)
_PARAMS = (dict, list, tuple, Struct, Mapping)  # the common ones first


class Options(Struct, kw_only=True):
    """What `connect` was told."""

    timeout: float = TIMEOUT
    retry: Retry = Retry()
    headers: Mapping[str, str] = {}
    coalesce: float | None = None
    discover: bool = True
    max_bytes: int = MAX_BYTES
    revision: str | None = None
    trust: Any = False
    confirm: Any = None
    clock: Clock = RealClock()
    chance: Callable[[], float] = random.random
    wrap: Callable[[Link], Link] = lambda link: link


class _Call(Struct, frozen=True, gc=False, tag_field="jsonrpc", tag="2.0"):
    method: str
    params: Any = UNSET
    id: Any = UNSET


class Client:
    """A client of plain JSON-RPC, and what the one of MCP is built on."""

    revision: str | None = None  # of MCP

    def __init__(self, link: Link, options: Options, kinds: Mapping[str, str] | None = None) -> None:
        self.arrays = Arrays()
        self.rpc = Names(self.call)
        self._link = link
        self._options = options
        self._clock = options.clock
        self._last_id = 0
        self._state = "new"
        self._kinds = kinds  # of the server's methods: "query" or "command"; None: not asked yet
        self._asking = asyncio.Lock()
        self._coalescer = Coalescer(options.coalesce, self._deliver_together) if options.coalesce is not None else None

    # --- the connection ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the connection; `async with` does it."""
        await self._link.open()
        self._state = "open"

    async def aclose(self) -> None:
        """Close the connection. Calls under way fail."""
        if self._state == "closed":
            return
        self._state = "closed"
        if self._coalescer is not None:
            await self._coalescer.aclose()
        await self._link.aclose()

    async def __aenter__(self: C) -> C:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- calls -------------------------------------------------------------------------------------------------------

    @overload
    async def call(
        self,
        method: str,
        params: Any = None,
        *,
        type: type[T],
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
    ) -> T: ...
    @overload
    async def call(
        self,
        method: str,
        params: Any = None,
        *,
        type: Any = None,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
    ) -> Any: ...
    async def call(
        self,
        method: str,
        params: Any = None,
        *,
        type: Any = None,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
    ) -> Any:
        """Call a method and wait for its result, read as `type`. `timeout` is the time for all attempts.

        `key` is the idempotency key: a text, True to mint one, False for none; without it, commands of servers that say
        which of their methods are commands get one. `query=True` says that the method only reads.
        """
        entry = self.entry(method, params, type=type, timeout=timeout, key=key, query=query)
        await self._run(entry)
        return entry.result()

    async def notify(self, method: str, params: Any = None, *, timeout: float | None = None) -> None:
        """Send a notification. Nobody will say whether it was understood."""
        entry = self.entry(method, params, timeout=timeout, is_notification=True)
        await self._run(entry)
        entry.result()

    def batch(self) -> Batch:
        """Calls that leave together: `async with client.batch() as b: one = b.call(...)`."""
        return Batch(self)

    def entry(self, method: str, params: Any = None, *, timeout: float | None = None, **options: Any) -> Entry:
        """A call to be made. Its time begins when it is sent."""
        given = self._options.timeout if timeout is None else timeout
        entry = Entry(method, params, self._converted, timeout=given, **options)
        _check(entry)
        return entry

    async def _run(self, entry: Entry) -> None:
        self._begin(entry)
        await self._ready(entry)
        if entry.is_settled:
            return
        if self._coalescer is not None and entry.safe and self.arrays.legal:
            await self._coalescer.add(entry, self.arrays.chunk)
        else:
            await self._deliver([entry])

    async def send_batch(self, entries: list[Entry]) -> tuple[Wire, str]:
        """Send all, settle all; gives how they went, and why so."""
        for entry in entries:
            self._begin(entry)
        for entry in entries:
            await self._ready(entry)
        left = [entry for entry in entries if not entry.is_settled]
        if len(left) < 2:
            reason = "there is one entry" if left else "nothing was sent"
            await _side_by_side([partial(self._deliver, [entry]) for entry in left])
            return "singles", reason
        left = await self._deliver_arrays(left)
        if not left:
            return "array", self.arrays.reason
        await _side_by_side([partial(self._deliver, [entry]) for entry in left])
        return "singles", self.arrays.reason

    # --- to be overridden --------------------------------------------------------------------------------------------

    async def _prepare(self, entry: Entry) -> None:
        """Before the first attempt: decide on its key and on whether it may be repeated (`safe`)."""
        kind = None
        if entry.key is None and entry.query is None:
            kind = await self._kind(entry)
        if entry.key is True or (kind == "command" and not isinstance(entry.params, _BY_POSITION)):
            entry.key = mint_key()
        entry.key = entry.key if isinstance(entry.key, str) else None
        entry.safe = entry.key is not None or entry.query is True or kind == "query"

    def _params(self, entry: Entry) -> Any:
        """The params as they travel; UNSET for none."""
        if entry.key is None:
            return UNSET if entry.params is None else entry.params
        return {**_members(entry.params), KEY: entry.key}

    def _converted(self, entry: Entry) -> Any:
        """The result as its caller wants it."""
        return decoded(entry)

    # --- the kinds of methods ----------------------------------------------------------------------------------------

    async def _kind(self, entry: Entry) -> str | None:
        """What the server says that a method is; None: it does not."""
        if self._kinds is None:
            await self._learn_kinds(entry)
        return (self._kinds or {}).get(entry.method)

    async def _learn_kinds(self, entry: Entry) -> None:
        """One call asks, the others wait for it; none gives more than a good half of its own time to that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(entry.timeout * 0.6), self._asking:
                if self._kinds is None:
                    self._kinds = await self._discovered(entry) if self._options.discover else {}

    async def _discovered(self, entry: Entry) -> Mapping[str, str] | None:
        """Our servers tell it by `rpc.discover`. Others refuse, and are not asked again; None: ask again."""
        question = Entry("rpc.discover", None, decoded, timeout=min(DISCOVERY, entry.timeout / 2), query=True)
        question.safe = True
        self._begin(question)
        await self._deliver([question])
        if isinstance(question.error, NotSent | ConnectionLost):
            return None
        return _kinds_in(question.result()) if question.ok else {}

    # --- attempts ----------------------------------------------------------------------------------------------------

    def _begin(self, entry: Entry) -> None:
        if self._state == "new":
            raise UsageError("The client is not open.", fix="async with connect(...) as client: ...")
        entry.deadline = self._clock.time() + entry.timeout

    async def _ready(self, entry: Entry) -> None:
        if entry.is_notification:
            entry.key = None
            return
        try:
            await self._prepare(entry)
        except (CallFailed, RpcError) as error:
            entry.fail(error)

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
        again = [entry for entry in entries if self._again(entry)]
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
            returned = await _side_by_side([partial(self._deliver, chunk, array=True) for chunk in chunks])
            entries = [entry for chunk in returned for entry in chunk]
        return entries

    async def _deliver_together(self, entries: list[Entry]) -> None:
        left = await self._deliver_arrays(entries) if len(entries) > 1 else entries
        await _side_by_side([partial(self._deliver, [entry]) for entry in left])

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
        entry.is_settled, entry.error, entry.replayed = False, None, False
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

    def _pause(self, entries: list[Entry]) -> float:
        asked = max(asked_pause(entry.error) for entry in entries if entry.error is not None)
        attempt = max(entry.attempts for entry in entries)
        return self._options.retry.pause(attempt, asked, self._options.chance())


# --- helpers --------------------------------------------------------------------------------------------------------


def _check(entry: Entry) -> None:
    if entry.params is not None and not isinstance(entry.params, _PARAMS):
        kind = type(entry.params).__name__
        raise UsageError(f"{entry.method}: params of type {kind}.", "JSON-RPC carries an array or an object", "use a dict")
    if entry.timeout <= 0:
        raise UsageError(f"{entry.method}: timeout={entry.timeout!r} has passed already.", fix="use a number above 0")
    if isinstance(entry.key, str):
        try:
            check_key(entry.key)
        except KeyInvalid as error:
            raise UsageError(f"{entry.method}: {entry.key!r} is not a key.", str(error.data["reason"])) from None
    if entry.key and isinstance(entry.params, _BY_POSITION):
        raise UsageError(
            f"{entry.method}: a key needs params by name.", f"it travels as the member {KEY}", "use a dict of params"
        )


def _members(params: Any) -> dict[str, Any]:
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return dict(params)
    members: dict[str, Any] = {name: getattr(params, name) for name in params.__struct_fields__}
    return members


def decoded(entry: Entry) -> Any:
    """A raw result as its `type`. One that does not fit is a bad answer to a call that ran."""
    assert entry.raw is not None
    try:
        if entry.type is None:
            return frames.decode_value(entry.raw)
        return msgspec.json.decode(entry.raw, type=entry.type)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadAnswer(f"{entry.method}: the result is not as expected: {error}", ran="yes") from None


def _kinds_in(document: Any) -> dict[str, str]:
    """`x-kind` of the methods in an OpenRPC document."""
    methods = document.get("methods") if isinstance(document, dict) else None
    described = [method for method in methods if isinstance(method, dict)] if isinstance(methods, list) else []
    return {m["name"]: m["x-kind"] for m in described if isinstance(m.get("name"), str) and isinstance(m.get("x-kind"), str)}


async def _side_by_side(work: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
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
