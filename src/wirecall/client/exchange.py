"""Calls in flight: one (`Entry`), and a message of them (`Exchange`) on a way to the server (`Link`).

An entry is settled once: by its own answer, or by one error of its own. The rules by which answers find entries:

1. By id, in any order. The client makes new ids for every attempt, so an answer to an attempt that was given up finds no
   entry.
2. An id that the client did not send answers nothing. The error of an entry without an answer quotes what came instead.
3. An id that is answered twice makes a bad answer, because either may be the true one.
4. An error without an id answers the whole message; so does a lone error that answers an array under a strange id.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from msgspec import UNSET, Raw, Struct

from wirecall.errors import BadAnswer, CallFailed, LimitExceeded, Refused, RpcError, UsageError, WirecallError
from wirecall.protocol.messages import LIMITS, Arrived, Received, Unreadable, read_messages, remote_error
from wirecall.stepping import Timeout

T = TypeVar("T")
Wire: TypeAlias = Literal["array", "singles"]
Params: TypeAlias = Mapping[str, Any] | Sequence[Any] | Struct | None
AnyEntry: TypeAlias = "Entry[Any]"

SHOWN = 120  # characters of a strange answer that an error quotes
_NULL = Raw(b"null")


class Entry(Struct, Generic[T], eq=False, repr_omit_defaults=True):
    """One call or notification, and what became of it."""

    method: str
    params: Any
    read: "Callable[[AnyEntry], Any]"  # makes the result of `raw`
    timeout: float
    type: Any = None
    key: str | bool | None = None  # a text once the entry is prepared, or None
    query: bool | None = None
    is_notification: bool = False
    extra: Any = None  # the dialect's
    deadline: float = 0.0
    safe: bool = False  # may be repeated
    id: int = 0
    attempts: int = 0
    unclear: bool = False  # an attempt was lost, and may have run
    deaths: tuple[bool, ...] = ()  # per lost connection: whether the answer had begun
    is_settled: bool = False
    raw: Raw = _NULL
    error: WirecallError | None = None
    replayed: bool = False
    retry_after: float = 0.0  # seconds that the HTTP answer asked the client to wait
    waiter: asyncio.Future[None] | None = None  # of a caller that waits for this entry alone
    _value: Any = None

    def __post_init__(self) -> None:
        if not self.timeout > 0:  # NaN is not, either: as a timer it would hold up all others
            raise UsageError(f"{self.method}: timeout must be greater than 0, got {self.timeout!r}.")

    @property
    def ok(self) -> bool:
        """Whether there is a result."""
        return self.is_settled and self.error is None

    def result(self) -> T:
        """Return the result, or raise the error."""
        if not self.is_settled:
            raise UsageError(
                f"{self.method} has not been sent yet.", "a batch is sent at the end of its block", "ask after it"
            )
        if self.error is not None:
            raise self.error
        value: T = self._value
        return value

    def succeed(self, raw: Raw) -> None:
        self.raw = raw
        self.error, self.is_settled = None, True
        try:
            self._value = self.read(self)
        except WirecallError as error:
            self.error = error
        except Exception as error:  # of the user's type; raised here, it would end the reader that other calls wait for
            why = f"{type(error).__name__}: {error}"
            self.error = BadAnswer(f"{self.method}: the result cannot be read as the wanted type: {why}", ran="yes")
            self.error.__cause__ = error

    def fail(self, error: WirecallError) -> None:
        self.error, self.is_settled = error, True


class Exchange:
    """One message in flight, and the entries in it that are still open."""

    # Of the class until a message changes them, as few do: a message is made for every call.
    begun = False  # its answer has begun
    is_refused = False  # as a whole: nothing in it ran
    is_standing = False  # a stream without an end: a message that answers no entry is not meant for it
    limit: Timeout | None = None  # of the attempt, while it waits
    stray = ""  # a description of the first message that answered no entry
    _pauses: Sequence[tuple[float, float | None]] = ()  # begin and end, None if it has not ended

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
        self.sent = False  # the server may have it
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
        """The end of an error text: what the server sent in place of an answer."""
        return f"; it sent {self.stray}" if self.stray else ""

    @property
    def stood_still(self) -> float:
        """The seconds of all pauses."""
        return sum((asyncio.get_running_loop().time() if end is None else end) - begin for begin, end in self._pauses)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the deadlines of the entries stand still in the block, because a person acts."""
        loop, limit = asyncio.get_running_loop(), self.limit
        begun, until = loop.time(), limit.when if limit else None
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

    def read(self, text: bytes) -> None:
        """Take all messages of a text."""
        is_array, messages = read_messages(text)
        if not messages:
            self.stray = self.stray or "an empty array"
        for message in messages:
            self.take(message, is_array)

    def take(self, message: Received, in_array: bool = False) -> None:
        """Settle the entry that a message answers."""
        id: Any = message.id
        # Answers come in any order (JSON-RPC 2.0, section 6). 1.0 is 1 in JSON, but true is not (RFC 8259, section 6).
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
            entry.replayed = isinstance(message.error.data, dict) and message.error.data.get("replayed") is True
        elif isinstance(message.result, Raw):
            entry.succeed(message.result)
        else:
            is_echo = message.method == entry.method
            what = "sent back the request itself" if is_echo else "sent a request where an answer was due"
            entry.fail(BadAnswer(f"{entry.method}: the server {what}"))
        self.on_settled(entry)

    def _take_stray(self, message: Received, in_array: bool) -> None:
        """Take a message that answers none of the open entries: a second answer, a refusal of all, or something else."""
        id: Any = message.id
        known = self.known.get(id) if type(id) in (int, float) else None
        if known is not None:
            if not isinstance(known.error, CallFailed):  # else it was given up, or is known to be answered twice
                known.fail(BadAnswer(f"{known.method}: the server answered this call twice"))
        # A server that cannot tell the id of a request answers with id null (JSON-RPC 2.0, section 5); some leave it out.
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
        """Fail all open entries: no further answer will come."""
        for entry in self._fail_open(error):
            self.on_settled(entry)

    def _fail_open(self, error: WirecallError) -> list[AnyEntry]:
        left = [*self.open.values(), *(one for one in self.entries if one.is_notification and not one.is_settled)]
        self.open.clear()
        for entry in left:
            entry.fail(error)
            if entry is not left[0]:  # a copy, because an exception remembers where it was raised
                entry.error = copy(error)
                entry.error.__cause__ = error.__cause__
        return left

    def end_of_answers(self) -> None:
        """Settle what is left: the server has sent all it will."""
        # A notification is not answered, so it is settled when it was sent (JSON-RPC 2.0, section 4.1).
        for entry in self.entries:
            if entry.is_notification and not entry.is_settled:
                entry.is_settled = True
                self.on_settled(entry)
        if self.open:
            for entry in list(self.open.values()):
                self.give_up(entry.id, BadAnswer(f"{entry.method}: the server gave no answer to this call{self.instead}"))

    def give_up(self, id: int, error: CallFailed) -> None:
        """Fail one entry that is still open."""
        entry = self.open.pop(id, None)
        if entry is not None:
            entry.fail(error)
            self.on_settled(entry)


class Link(Protocol):
    """One way to a server."""

    async def open(self) -> None: ...

    async def exchange(self, exchange: Exchange) -> None:
        """Send, and take answers until no further one will come. It may be cancelled at any moment."""

    async def aclose(self) -> None: ...


class LocalLink(Link):
    """A link to an app of this process."""


# --- how a batch leaves ---------------------------------------------------------------------------------------------


class Arrays:
    """Whether calls may leave together in one array, how many of them, and why."""

    # Refusals of the array itself. Another status would meet single calls as well.
    _STATUSES = frozenset({400, 405, 415, 422})
    _CODES = frozenset({-32700, -32600, -32601, -32602})

    def __init__(self, legal: bool = True, reason: str = "JSON-RPC 2.0 has arrays") -> None:
        self.legal = legal
        self.reason = reason
        self.chunk = LIMITS.batch

    def learn(self, exchange: Exchange) -> bool:
        """Learn from the refusal of an array; return whether its entries may be sent in another way."""
        if not exchange.array or not exchange.is_refused:
            return False
        error, count = exchange.entries[0].error, len(exchange.entries)
        too_large = isinstance(error, Refused) and error.status == 413
        chunk = count // 2
        if isinstance(error, LimitExceeded) and isinstance(error.data, dict):
            named, limit = error.data.get("limit"), error.data.get("max")
            too_large = named in ("batch", "bytes_in")
            if named == "batch" and isinstance(limit, int) and 0 < limit < count:
                chunk = limit
        if too_large:
            self.chunk = chunk
            return True
        is_array = isinstance(error, RpcError) and error.code in self._CODES
        if is_array or (isinstance(error, Refused) and error.status in self._STATUSES):
            self.legal, self.reason = False, f"the server refused an array: {str(error)[:SHOWN]}"
            return True
        return False
