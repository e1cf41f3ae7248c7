"""Calls in flight: one call (`Entry`), a message with calls (`Exchange`), the connection (`Link`).

An entry is settled once: by its own answer, or by one error. The rules that match answers to
entries:

1. By id, in any order. The client makes new ids for every attempt, so an answer to an abandoned
   attempt matches no entry.
2. An id that the client did not send answers nothing. The error of an entry without an answer
   quotes what the server sent instead.
3. Two answers to one id make a bad answer, because either may be the right one.
4. An error without an id answers the whole message; so does a single error that answers an array
   under an unknown id.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from msgspec import UNSET, Raw, Struct

from wirecall.aio import Timeout
from wirecall.client.refs import ResultRef
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    LimitExceeded,
    Refused,
    RpcError,
    UsageError,
    WirecallError,
)
from wirecall.limits import LIMITS
from wirecall.protocol.messages import Arrived, Received, Unreadable, read_messages, remote_error

T = TypeVar("T")
# How a batch was sent: "array", "arrays(2)", "stream", "streams(2)", "singles", "waves(3)", "tool".
Wire: TypeAlias = str
Params: TypeAlias = Mapping[str, Any] | Sequence[Any] | Struct | None
AnyEntry: TypeAlias = "Entry[Any]"

SHOWN = 120  # characters of an unexpected answer that an error quotes
_NULL = Raw(b"null")


class EntryLinks(Struct, frozen=True, eq=False):
    """What an entry takes from other entries of its message, as it is sent."""

    # The place of each value in the params, the entry that gives it, and the place in its result.
    refs: "tuple[tuple[str, AnyEntry, str], ...]" = ()
    # The entries that must have succeeded.
    after: "tuple[AnyEntry, ...]" = ()


class Entry(Struct, Generic[T], eq=False, repr_omit_defaults=True):
    """One call or notification, and its outcome."""

    method: str
    params: Any
    # Makes the result from `raw`.
    read: "Callable[[AnyEntry], Any]"
    timeout: float
    type: Any = None
    # A string or None once the entry is prepared.
    key: str | bool | None = None
    query: bool | None = None
    is_notification: bool = False
    # The data of the dialect.
    extra: Any = None
    deadline: float = 0.0
    # The entry may be repeated.
    safe: bool = False
    id: int = 0
    attempts: int = 0
    # An attempt was lost, and may have run.
    unclear: bool = False
    # For each lost connection: whether the answer had begun.
    deaths: tuple[bool, ...] = ()
    is_settled: bool = False
    raw: Raw = _NULL
    error: WirecallError | None = None
    replayed: bool = False
    # The seconds that the HTTP answer asked the client to wait.
    retry_after: float = 0.0
    # The future of a caller that waits only for this entry.
    waiter: asyncio.Future[None] | None = None
    # A later entry of the batch refers to the result.
    is_target: bool = False
    # The entries of the batch that must have succeeded before this one.
    after: "tuple[AnyEntry, ...]" = ()
    # Set while the entry is sent in one message with those that it needs.
    links: EntryLinks | None = None
    # The batch wants the answers of an array as they complete.
    wants_stream: bool = False
    # The answer came in a stream.
    was_streamed: bool = False
    _value: Any = None

    def __post_init__(self) -> None:
        if not self.timeout > 0:  # NaN is not, either: as a timer it would block all others
            raise UsageError(
                f"{self.method}: timeout must be greater than 0, got {self.timeout!r}."
            )

    @property
    def ok(self) -> bool:
        """Whether there is a result."""
        return self.is_settled and self.error is None

    def result(self) -> T:
        """Return the result, or raise the error."""
        if not self.is_settled:
            raise UsageError(
                f"{self.method} has not been sent yet.",
                "a batch is sent at the end of its block",
                "ask after it",
            )
        if self.error is not None:
            raise self.error
        value: T = self._value
        return value

    def ref(self, path: str = "") -> ResultRef:
        """Return a value for the params of a later call of the same batch: a part of this result.

        `path` is a JSON Pointer into the result; a `*` in it takes every item of an array.
        """
        from wirecall.server.references import read_pointer

        if self.is_notification:
            raise UsageError(
                f"{self.method}: a notification has no result.", fix="use batch.call(...)"
            )
        try:
            read_pointer(path, "path")
        except RpcError as error:
            raise UsageError(
                f"{self.method}: ref({path!r}) is not a reference.",
                str(error.data["reason"]),
                'use a JSON Pointer, such as ref("/orders/0/id"), or ref() for the whole result',
            ) from None
        self.is_target = True
        return ResultRef(self, path)

    def succeed(self, raw: Raw) -> None:
        self.raw = raw
        self.error = None
        self.is_settled = True
        try:
            self._value = self.read(self)
        except WirecallError as error:
            self.error = error
        # From the user's type; raised here, it would stop the reader of all calls.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self.error = BadAnswer(
                f"{self.method}: the result cannot be read as the wanted type: {why}", ran="yes"
            )
            self.error.__cause__ = error

    def fail(self, error: WirecallError) -> None:
        self.error = error
        self.is_settled = True


class StreamCut(ConnectionLost):
    """A stream of answers has ended without its end record.

    An entry that is not sent again ends with `OutcomeUnknown`.
    """


class Exchange:
    """One message in flight, and the entries in it that are still open."""

    # Class attributes until a message changes them, as few do: a message is made for every call.
    # The answer has begun.
    begun = False
    # The server refused the whole message: no call in it ran.
    is_refused = False
    # An endless stream: a message that answers no entry is not meant for it.
    is_standing = False
    # The answers may come as a stream, each as soon as it is ready.
    wants_stream = False
    # The answers come as a stream: each of them is final.
    is_stream = False
    # The time limit of the attempt, while it waits.
    limit: Timeout | None = None
    # Seconds without an answer after which the attempt is lost. None: it has no such limit.
    silence: float | None = None
    # The loop time at which the last entry expires, if the attempt has such a limit.
    latest = 0.0
    # A description of the first message that answered no entry.
    stray = ""
    # The start and the end of each pause. None: it has not ended yet.
    _pauses: Sequence[tuple[float, float | None]] = ()

    def __init__(
        self,
        data: bytes,
        entries: list[AnyEntry],
        array: bool,
        on_settled: Callable[[AnyEntry], None] = lambda _entry: None,
    ) -> None:
        self.data = data
        self.entries = entries
        self.array = array
        # The server may have the message.
        self.sent = False
        self.on_settled = on_settled
        is_call = len(entries) == 1 and not entries[0].is_notification
        self.open = {entries[0].id: entries[0]} if is_call else self.known

    @property
    def known(self) -> dict[int, AnyEntry]:
        """All calls in the message, answered or not, by id."""
        return {entry.id: entry for entry in self.entries if not entry.is_notification}

    @property
    def is_done(self) -> bool:
        return not self.open

    @property
    def instead(self) -> str:
        """The end of an error message: what the server sent instead of an answer."""
        if not self.stray:
            return ""
        return f"; it sent {self.stray}"

    @property
    def stood_still(self) -> float:
        """The total seconds of all pauses."""
        return sum(
            (asyncio.get_running_loop().time() if end is None else end) - begin
            for begin, end in self._pauses
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the deadlines of the entries in the block, because a person acts."""
        loop = asyncio.get_running_loop()
        limit = self.limit
        begun = loop.time()
        until = limit.when if limit else None
        if limit is not None:
            limit.move(None)
        earlier = self._pauses
        self._pauses = (*earlier, (begun, None))
        try:
            yield
        finally:
            ended = loop.time()
            self._pauses = (*earlier, (begun, ended))
            passed = ended - begun
            for entry in self.entries:
                entry.deadline += passed
            if limit is not None and until is not None:
                limit.move(until + passed)

    def note_part(self) -> None:
        """Note that a part of the answer has come: the silence begins again."""
        if self.silence is not None and self.limit is not None:
            now = asyncio.get_running_loop().time()
            self.limit.move(min(now + self.silence, self.latest))

    def read(self, text: bytes) -> None:
        """Take all messages in a body or line."""
        is_array, messages = read_messages(text)
        if not messages:
            self.stray = self.stray or "an empty array"
        for message in messages:
            self.take(message, is_array)

    def take(self, message: Received, in_array: bool = False) -> None:
        """Settle the entry that a message answers."""
        id: Any = message.id
        # Answers come in any order (JSON-RPC 2.0, section 6). 1.0 is 1 in JSON, but true is not
        # (RFC 8259, section 6).
        entry = self.open.pop(id, None) if type(id) in (int, float) else None
        if entry is None:
            self._take_stray(message, in_array)
            return
        if in_array and not self.array:
            entry.fail(BadAnswer(f"{entry.method}: a single call was answered with an array"))
        elif isinstance(message, Unreadable):
            entry.fail(BadAnswer(f"{entry.method}: the server sent {message.reason}"))
        elif message.error is not UNSET:
            entry.fail(remote_error(message.error))
            entry.replayed = (
                isinstance(message.error.data, dict) and message.error.data.get("replayed") is True
            )
        elif isinstance(message.result, Raw):
            entry.succeed(message.result)
        else:
            what = "sent a request where an answer was due"
            if message.method == entry.method:
                what = "sent back the request itself"
            entry.fail(BadAnswer(f"{entry.method}: the server {what}"))
        self.on_settled(entry)

    def _take_stray(self, message: Received, in_array: bool) -> None:
        """Take a message that answers no open entry.

        It is a second answer, a refusal of the whole message, or something else.
        """
        id: Any = message.id
        known = self.known.get(id) if type(id) in (int, float) else None
        if known is not None:
            # Else it was abandoned, or already answered twice. The first answer of a stream counts,
            # because the program may already have it.
            if not isinstance(known.error, CallFailed) and not self.is_stream:
                known.fail(BadAnswer(f"{known.method}: the server answered this call twice"))
        # A server that cannot read the id of a request answers with id null (JSON-RPC 2.0, section
        # 5); some omit it.
        elif (
            isinstance(message, Arrived)
            and message.error is not UNSET
            and not in_array
            and (message.id is UNSET or message.id is None or self.array)
        ):
            self.refuse(remote_error(message.error))
        elif not self.stray:
            if isinstance(message, Unreadable):
                self.stray = message.reason[:SHOWN]
            elif message.is_answer:
                self.stray = f"an answer to id {message.id!r:.{SHOWN}}, which was not asked"
            else:
                self.stray = f"a request or notification {message.method!r:.{SHOWN}}"

    def replayed(self, ids: Collection[Any] | None = None) -> None:
        """Mark the answers that came from the server's ledger; None: all of them."""
        known = self.known
        for id in known if ids is None else ids:
            if isinstance(id, int) and id in known:
                known[id].replayed = True

    def refuse(self, error: RpcError | CallFailed) -> None:
        """Fail all open entries with an error that answers the whole message."""
        self.is_refused = error.ran == "no" and len(self.open) == len(self.known)
        self._fail_open(error)

    def end(self, error: WirecallError) -> None:
        """Fail all open entries: no more answers will come."""
        for entry in self._fail_open(error):
            self.on_settled(entry)

    def _fail_open(self, error: WirecallError) -> list[AnyEntry]:
        left = [
            *self.open.values(),
            *(one for one in self.entries if one.is_notification and not one.is_settled),
        ]
        self.open.clear()
        for entry in left:
            entry.fail(error)
            if entry is not left[0]:  # a copy, because an exception stores where it was raised
                entry.error = copy(error)
                entry.error.__cause__ = error.__cause__
        return left

    def end_of_answers(self) -> None:
        """Settle the remaining entries: the server has sent all its answers."""
        # A notification is not answered, so it is settled once it is sent (JSON-RPC 2.0, section
        # 4.1).
        for entry in self.entries:
            if entry.is_notification and not entry.is_settled:
                entry.is_settled = True
                self.on_settled(entry)
        if self.open:
            for entry in list(self.open.values()):
                self.give_up(
                    entry.id,
                    BadAnswer(
                        f"{entry.method}: the server gave no answer to this call{self.instead}"
                    ),
                )

    def give_up(self, id: int, error: CallFailed) -> None:
        """Fail one entry that is still open."""
        entry = self.open.pop(id, None)
        if entry is not None:
            entry.fail(error)
            self.on_settled(entry)


class Link(Protocol):
    """One connection to a server."""

    async def open(self) -> None: ...

    async def exchange(self, exchange: Exchange) -> None:
        """Send, and take answers until the last one. It may be cancelled at any time."""

    async def aclose(self) -> None: ...


class LocalLink(Link):
    """A link to an app of this process."""


# --- how a batch is sent
# --------------------------------------------------------------------------------------------


class Arrays:
    """Whether calls may be sent together in one array, how many of them, and why."""

    # Refusals of the array itself. Any other status would also refuse single calls.
    _STATUSES = frozenset({400, 405, 415, 422})
    _CODES = frozenset({-32700, -32600, -32601, -32602})

    def __init__(self, legal: bool = True, reason: str = "JSON-RPC 2.0 has arrays") -> None:
        self.legal = legal
        self.reason = reason
        self.chunk = LIMITS.batch
        # Max length of an array, once the server has refused a longer one.
        self.bytes: int | None = None

    def split(
        self, entries: list[AnyEntry], size_of: Callable[[AnyEntry], int]
    ) -> list[list[AnyEntry]]:
        """Split the entries into arrays that the server accepts, each as full as possible."""
        if self.bytes is None:  # sizes do not matter
            return [
                entries[start : start + self.chunk] for start in range(0, len(entries), self.chunk)
            ]
        chunks: list[list[AnyEntry]] = []
        room = 0
        for entry in entries:
            size = size_of(entry) + 1  # a comma, or a bracket
            if not chunks or size > room or len(chunks[-1]) == self.chunk:
                chunks.append([])
                room = self.bytes - 1
            chunks[-1].append(entry)
            room -= size
        return chunks

    def learn(self, exchange: Exchange) -> bool:
        """Learn from a refused array; return whether its entries may be sent differently."""
        if not exchange.array or not (exchange.is_refused or _refuses_each(exchange)):
            return False
        error = next((entry.error for entry in exchange.entries if entry.error is not None), None)
        count = len(exchange.entries)
        if refuses_batch(error):
            self._take_fewer(error, count)
            return count > 1
        if _limit_of(error) == "bytes_in" or (isinstance(error, Refused) and error.status == 413):
            self._take_shorter(error, len(exchange.data))
            return count > 1
        is_array = isinstance(error, RpcError) and error.code in self._CODES
        if is_array or (isinstance(error, Refused) and error.status in self._STATUSES):
            self.legal = False
            self.reason = f"the server refused an array: {str(error)[:SHOWN]}"
            return True
        return False

    def _take_fewer(self, error: WirecallError | None, count: int) -> None:
        limit = _maximum(error)
        self.chunk = limit if limit is not None and limit < count else max(count // 2, 1)

    def _take_shorter(self, error: WirecallError | None, size: int) -> None:
        limit = _maximum(error)
        self.bytes = limit if limit is not None and limit < size else size // 2


def refuses_batch(error: WirecallError | None) -> bool:
    """Return whether the error of an entry means that its whole array has too many entries."""
    return _limit_of(error) == "batch"


def _refuses_each(exchange: Exchange) -> bool:
    """Return whether a server refused an array with an error per call.

    `App(batch_refusal="entries")` does that.
    """
    calls = exchange.known.values()
    return bool(calls) and all(refuses_batch(entry.error) for entry in calls)


def _limit_of(error: WirecallError | None) -> object:
    """Return the name of the limit that a message exceeds, None for another error."""
    if not isinstance(error, LimitExceeded) or not isinstance(error.data, dict):
        return None
    return error.data.get("limit")


def _maximum(error: WirecallError | None) -> int | None:
    """Return the limit that an error names, if it is valid."""
    if not isinstance(error, RpcError) or not isinstance(error.data, dict):
        return None
    limit = error.data.get("max")
    if type(limit) is not int or limit <= 0:
        return None
    return limit
