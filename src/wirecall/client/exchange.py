"""Calls on their way: one (`Entry`), a message of them (`Exchange`), and a user's batch (`Batch`).

An entry is settled once: by its own answer, or by one error of its own. The rules by which answers find entries:

1. By id, in whatever order they come. The ids are ours and are new for every attempt, so an answer to an attempt that was
   given up meets nobody.
2. An id that we did not send answers nothing. The entries that are left without an answer say so, and what came instead.
3. An id that is answered twice is an entry whose answer nobody knows.
4. An error without an id answers the whole message; so does a lone error that answers an array under a strange id.
"""

import asyncio
from collections.abc import Callable, Collection
from copy import copy
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias

from msgspec import UNSET, Raw

from wirecall.errors import (
    BadAnswer,
    CallFailed,
    LimitExceeded,
    Refused,
    RpcError,
    UsageError,
    WirecallError,
)
from wirecall.protocol.messages import MAX_BATCH
from wirecall.protocol.replies import Arrived, Message, Unreadable, read_messages, remote_error

Wire: TypeAlias = Literal["array", "singles"]
Convert: TypeAlias = Callable[["Entry"], Any]

SHOWN = 120  # characters of a strange answer that an error quotes


class Entry:
    """One call or notification, and what became of it."""

    __slots__ = (
        *("convert", "deadline", "extra", "is_notification", "key", "method", "params", "query", "timeout", "type"),
        *("_value", "attempts", "deaths", "error", "id", "is_settled", "raw", "replayed", "retry_after", "safe"),
        *("unclear", "waiter"),
    )

    def __init__(
        self,
        method: str,
        params: Any,
        convert: Convert,
        *,
        timeout: float,
        type: Any = None,
        key: str | bool | None = None,
        query: bool | None = None,
        is_notification: bool = False,
    ) -> None:
        self.method = method
        self.params = params
        self.convert = convert
        self.timeout = timeout
        self.type = type
        self.key = key  # a text once the entry is prepared, or None
        self.query = query
        self.is_notification = is_notification
        self.deadline = 0.0
        self.extra: Any = None
        self.safe = False  # may be repeated
        self.id = 0
        self.attempts = 0
        self.unclear = False  # an attempt was lost, and may have run
        self.deaths: tuple[bool, ...] = ()  # per lost connection: whether the answer had begun
        self.is_settled = False
        self.raw: Raw | None = None
        self.error: WirecallError | None = None
        self.replayed = False
        self.retry_after = 0.0  # seconds that the HTTP answer asked the client to wait
        self.waiter: asyncio.Future[None] | None = None  # of somebody who waits for this entry alone
        self._value: Any = None

    @property
    def ok(self) -> bool:
        """Whether there is a result."""
        return self.is_settled and self.error is None

    def result(self) -> Any:
        """The result, or the error as an exception."""
        if not self.is_settled:
            raise UsageError(
                f"{self.method} has not been sent yet.", "a batch is sent at the end of its block", "ask after it"
            )
        if self.error is not None:
            raise self.error
        return self._value

    def succeed(self, raw: Raw) -> None:
        self.raw = raw
        self.error, self.is_settled = None, True
        try:
            self._value = self.convert(self)
        except WirecallError as error:
            self.error = error

    def fail(self, error: WirecallError) -> None:
        self.error, self.is_settled = error, True


class Exchange:
    """One message under way, and the entries in it that are still open."""

    __slots__ = ("array", "begun", "data", "entries", "is_refused", "known", "on_settled", "open", "sent", "strays")

    def __init__(self, data: bytes, entries: list[Entry], array: bool, on_settled: Callable[[Entry], None]) -> None:
        self.data = data
        self.entries = entries
        self.array = array
        self.known = {entry.id: entry for entry in entries if not entry.is_notification}
        self.open = dict(self.known)
        self.sent = False  # the server may have it
        self.begun = False  # its answer has begun
        self.is_refused = False  # as a whole: nothing in it ran
        self.strays: list[str] = []
        self.on_settled = on_settled

    @property
    def is_done(self) -> bool:
        return not self.open

    def read(self, text: bytes) -> None:
        """Take all that a text carries."""
        is_array, messages = read_messages(text)
        if not messages:
            self.strays.append("an empty array")
        for message in messages:
            self.take(message, is_array)

    def take(self, message: Message, in_array: bool = False) -> None:
        """An answer to one of the entries, or not."""
        id: Any = message.id
        entry: Entry | None = self.open.pop(id, None) if type(id) in (int, float) else None  # 1.0 is 1 in JSON
        if entry is None:
            self._strange(message, in_array)
        elif in_array and not self.array:
            entry.fail(BadAnswer(f"{entry.method}: a single call was answered with an array"))
            self.on_settled(entry)
        else:
            _settle(entry, message)
            self.on_settled(entry)

    def replayed(self, ids: Collection[Any] | None = None) -> None:
        """These answers came from the server's ledger; None: all of them."""
        for id in self.known if ids is None else ids:
            if isinstance(id, int) and id in self.known:
                self.known[id].replayed = True

    def refuse(self, error: RpcError | CallFailed) -> None:
        """An error that answers the whole message."""
        self.is_refused = error.ran == "no" and len(self.open) == len(self.known)
        self._fail_open(error)

    def end(self, error: WirecallError) -> None:
        """No further answer will come: the entries that are open have failed."""
        for entry in self._fail_open(error):
            self.on_settled(entry)

    def _fail_open(self, error: WirecallError) -> list[Entry]:
        left = list(self.open.values())
        self.open.clear()
        left += [entry for entry in self.entries if entry.is_notification and not entry.is_settled]
        for entry in left:
            entry.fail(error if entry is left[0] else _another(error))
        return left

    def end_of_answers(self) -> None:
        """The server has said all it will. Notifications are owed nothing."""
        for entry in self.entries:
            if entry.is_notification and not entry.is_settled:
                entry.succeed(_NULL)
                self.on_settled(entry)
        if self.open:
            instead = f"; it sent {self.strays[0]}" if self.strays else ""
            for entry in list(self.open.values()):
                del self.open[entry.id]
                entry.fail(BadAnswer(f"{entry.method}: the server gave no answer to this call{instead}"))
                self.on_settled(entry)

    def give_up(self, id: int, error: CallFailed) -> None:
        """One entry will not be waited for any longer."""
        entry = self.open.pop(id, None)
        if entry is not None:
            entry.fail(error)
            self.on_settled(entry)

    def _strange(self, message: Message, in_array: bool) -> None:
        """What answers none of the open entries."""
        is_error = isinstance(message, Arrived) and message.error is not UNSET
        if isinstance(message.id, int) and message.id in self.known:
            self._doubled(self.known[message.id])
        elif is_error and not in_array and (message.id is UNSET or message.id is None or self.array):
            assert isinstance(message, Arrived) and message.error is not UNSET
            self.refuse(remote_error(message.error))
        elif not self.strays:
            self.strays.append(_description(message))

    def _doubled(self, entry: Entry) -> None:
        if isinstance(entry.error, CallFailed):
            return  # it was given up, or it is known to be answered twice
        entry.fail(BadAnswer(f"{entry.method}: the server answered this call twice"))


def _description(message: Message) -> str:
    if isinstance(message, Unreadable):
        return message.reason[:SHOWN]
    if not message.is_answer:
        return f"a request or notification {message.method!r:.{SHOWN}}"
    return f"an answer to id {message.id!r:.{SHOWN}}, which was not asked"


_NULL = Raw(b"null")


def _another(error: WirecallError) -> WirecallError:
    """The same error for another caller: where it is raised is written into it."""
    copied = copy(error)
    copied.__cause__ = error.__cause__
    return copied


def _settle(entry: Entry, message: Message) -> None:
    if isinstance(message, Unreadable):
        entry.fail(BadAnswer(f"{entry.method}: {message.reason}"))
    elif message.error is not UNSET:
        entry.fail(remote_error(message.error))
        entry.replayed = isinstance(message.error.data, dict) and message.error.data.get("replayed") is True
    elif isinstance(message.result, Raw):
        entry.succeed(message.result)
    else:
        what = "sent back the request itself" if message.method == entry.method else "sent a request where an answer was due"
        entry.fail(BadAnswer(f"{entry.method}: the server {what}"))


# --- how a batch leaves ---------------------------------------------------------------------------------------------


class Arrays:
    """Whether calls may leave together in one array, how many, and why."""

    # Refusals of an array as such. Another status would meet single calls as well.
    _STATUSES = frozenset({400, 405, 415, 422})
    _CODES = frozenset({-32700, -32600, -32601, -32602})

    def __init__(self, legal: bool = True, reason: str = "JSON-RPC 2.0 has arrays", chunk: int = MAX_BATCH) -> None:
        self.legal = legal
        self.reason = reason
        self.chunk = chunk

    def learn(self, error: WirecallError | None, count: int) -> bool:
        """An array of `count` entries was refused, and nothing ran. True: they may be sent in another way, now known."""
        if self._is_size(error):
            limit = error.data.get("max") if isinstance(error, LimitExceeded) and error.data["limit"] == "batch" else None
            self.chunk = limit if isinstance(limit, int) and 0 < limit < count else count // 2
            return True
        is_array = isinstance(error, RpcError) and error.code in self._CODES
        if is_array or (isinstance(error, Refused) and error.status in self._STATUSES):
            self.legal, self.reason = False, f"the server refused an array: {str(error)[:SHOWN]}"
            return True
        return False

    @staticmethod
    def _is_size(error: WirecallError | None) -> bool:
        if isinstance(error, LimitExceeded):
            return isinstance(error.data, dict) and error.data.get("limit") in ("batch", "bytes_in")
        return isinstance(error, Refused) and error.status == 413


class Sender(Protocol):
    """What a batch needs of its client."""

    def entry(self, method: str, params: Any, **options: Any) -> Entry: ...
    async def send_batch(self, entries: list[Entry]) -> tuple[Wire, str]: ...


class Batch:
    """Calls that are collected in a block and sent at its end; nothing is sent if the block fails."""

    def __init__(self, client: Sender) -> None:
        self._client = client
        self.entries: list[Entry] = []
        self.wire: Wire | None = None
        self.reason = "nothing was sent"
        self.rpc = Names(self.call)

    def call(
        self,
        method: str,
        params: Any = None,
        *,
        type: Any = None,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
    ) -> Entry:
        """Add a call. Its outcome is in the entry when the block is over."""
        return self._add(self._client.entry(method, params, type=type, timeout=timeout, key=key, query=query))

    def notify(self, method: str, params: Any = None) -> Entry:
        """Add a notification: the server does not answer it."""
        return self._add(self._client.entry(method, params, is_notification=True))

    def _add(self, entry: Entry) -> Entry:
        if self.wire is not None:
            raise UsageError("The batch was sent already.", fix="begin another: client.batch()")
        self.entries.append(entry)
        return entry

    async def __aenter__(self) -> "Batch":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        if kind is None and self.entries:
            self.wire, self.reason = await self._client.send_batch(self.entries)


class Names:
    """Methods as attributes: `rpc.price(sku="tea")` calls `price`, and `rpc.order.place(...)` calls `order.place`."""

    __slots__ = ("_call", "_path")

    def __init__(self, call: Callable[..., Any], path: str = "") -> None:
        self._call = call
        self._path = path

    def __getattr__(self, name: str) -> "Names":
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(self._call, f"{self._path}.{name}" if self._path else name)

    def __call__(self, *by_position: Any, **by_name: Any) -> Any:
        if by_position and by_name:
            raise UsageError(
                f"{self._path} got params by position and by name.",
                "JSON-RPC carries an array or an object",
                "use one of both",
            )
        return self._call(self._path, list(by_position) or by_name or None)
