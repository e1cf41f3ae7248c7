"""The dispatcher of an app whose calls are watched.

It is a subclass, so that an app without a tap pays nothing, not even a check. It hands the tap one
row per call, when the call has ended:

    ended, mark, method, id, code, position, more

`ended` is a reading of `clock`. `code` is None for a call that succeeded. `more` is None for a
plain query that did not wait.

A batch of plain queries takes less than a microsecond for each, and a separate row for each would
add half of that. So the dispatcher hands over the batch as it was read, and its entries share the
time of their batch. If that is longer than `QUICK` for each entry, the entries of
the next batches are measured one by one, until a batch is quick again. The first batch of a process
is measured as well.
"""

from collections.abc import Awaitable, Coroutine
from functools import partial
from itertools import count
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.answers import Answers
from wirecall.errors import InternalError, Ran, RpcError
from wirecall.logs import watch_ids
from wirecall.protocol.messages import Data, Id, Invalid, Message, Success
from wirecall.protocol.sender import ANYONE, Sender
from wirecall.server.call import Call, CallTap, Frame, Handler, Mark, Passed, Shape, clock
from wirecall.server.context import Context
from wirecall.server.dispatch import Dispatcher, Pending, Reply
from wirecall.server.ids import Ids
from wirecall.server.lax import LaxDispatcher
from wirecall.server.linking import Begin, Filled, Linking
from wirecall.server.method import Method

# Characters of names that a row keeps.
LONGEST = 100
# Seconds of an entry. If the entries of a batch take longer on average, they are measured.
QUICK = 0.00001

RowId: TypeAlias = int | str | float | None


class More(Struct, eq=False, gc=False, array_like=True):
    """The facts about a call that a plain query does not have."""

    kind: Literal["query", "command"] | None = None
    outcome: str = "ok"
    ran: Ran = "yes"
    key: str | None = None
    replayed: bool = False
    recognised: bool = False
    attempt: int = 0
    # Readings of `clock`: when the call was admitted, when its function began and when it ended.
    started: float = 0.0
    entered: float = 0.0
    left: float = 0.0
    call_id: str | None = None
    trace_id: str | None = None
    # The call id of the batch tool's call that this call was an entry of.
    parent: str | None = None
    # Why a message was refused.
    reason: str | None = None
    # Set by a gateway.
    passed: Passed | None = None


# number, ended, mark, method, id, code, position, more
RawRow: TypeAlias = tuple[int, float, Mark, str, RowId, int | None, int | None, More | None]


class DispatcherTap(CallTap, Protocol):
    """What the dispatcher needs from a tap."""

    def note(
        self,
        ended: float,
        mark: Mark,
        name: str,
        id: RowId,
        code: int | None,
        position: int | None,
        more: More | None,
    ) -> int:
        """Add a row, and return its number."""
        ...

    def note_bundle(self, mark: Mark, messages: list[Message | Invalid]) -> None:
        """Add the rows of a batch's entries that have none: plain queries that succeeded."""
        ...

    @property
    def captures(self) -> bool:
        """Whether bodies are kept. Then every call takes all the steps."""
        ...

    def note_references(self, mark: Mark, waits: dict[int, tuple[int, ...]]) -> None:
        """Take the references between the entries of a batch."""
        ...

    def opened(self, mark: Mark) -> None:
        """Take a batch whose entries begin."""
        ...

    def closed(self, mark: Mark) -> None:
        """Forget a batch whose reply is complete."""
        ...


def row_id(id: Id | UnsetType) -> RowId:
    """Return an id for a row: numbers as they are, and only the beginning of a long string."""
    if id is UNSET or id is None:
        return None
    if isinstance(id, Raw):
        return bytes(id)[:LONGEST].decode(errors="replace")
    if isinstance(id, str) and len(id) > LONGEST:
        return id[:LONGEST]
    return id


def array_of(sender: Sender) -> Mark | None:
    """Return what the rows of the array share in which a message came."""
    entry = sender.entry
    if entry is None:
        return None
    assert isinstance(entry.mark, Mark)
    return entry.mark


class TappedDispatcher(Dispatcher):
    """A dispatcher that writes a row about every call."""

    def __init__(self, tap: DispatcherTap, *rest: Any, **options: Any) -> None:
        super().__init__(*rest, **options)
        self._tap = tap
        # Bound once: `super()` costs a twentieth of a call.
        self._answer_to = super().handle
        self._note = tap.note
        self._note_bundle = tap.note_bundle
        # The entries of the next batch are measured one by one.
        self._is_measured = True
        self._batches = count(1)
        # The id of the call that failed last.
        self._failed: str | None = None
        # The message that `handle` reads now. Its synchronous part runs without an interruption.
        self._mark = Mark(0.0)
        if tap.captures:
            self._is_observed = True
            watch_ids(self)

    def handle(
        self,
        data: Data,
        sender: Sender = ANYONE,
        alone: bool = False,
        replayed: list[Id] | None = None,
        key: str | None = None,
        answers: Answers | None = None,
    ) -> "bytes | Coroutine[Any, Any, bytes | None] | None":
        self._mark = Mark(clock(), sender.caller, len(data))
        return self._answer_to(data, sender, alone, replayed, key, answers)

    def _frame(
        self,
        sender: Sender,
        alone: bool,
        logged: bool,
        replayed: list[Id] | None,
        key: str | None,
    ) -> Frame:
        frame = super()._frame(sender, alone, logged, replayed, key)
        frame.mark = self._mark
        return frame

    # --- batches ----------------------------------------------------------------------------------

    def begin_array(self, sender: Sender, size: int) -> Mark:
        return Mark(clock(), sender.caller, 0, "mcp", next(self._batches), size, is_measured=True)

    def _begin_batch(self, frame: Frame, size: int, *, measured: bool = False) -> Begin:
        mark = self._mark_of(frame)
        mark.batch = next(self._batches)
        mark.size = size
        if measured or self._is_measured or frame.in_full:
            mark.is_measured = True
            self._tap.opened(mark)
            return self._begin
        # Without a row for each: `_end_batch` notes all of them.
        return super()._begin

    def _end_batch(
        self, frame: Frame, messages: list[Message | Invalid], *, is_complete: bool
    ) -> None:
        mark = self._mark_of(frame)
        mark.ended = clock()
        if mark.is_measured:
            self._tap.closed(mark)
        elif is_complete:
            self._note_bundle(mark, messages)
        if messages:
            self._is_measured = mark.ended - mark.begun > QUICK * mark.size

    def _mark_of(self, frame: Frame) -> Mark:
        assert frame.mark is not None  # `_frame` has set it
        return frame.mark

    def _linking(self, frame: Frame, messages: list[Message | Invalid]) -> Linking:
        linking = super()._linking(frame, messages)
        assert frame.mark is not None
        self._tap.note_references(frame.mark, linking.waits)
        return linking

    # --- one entry --------------------------------------------------------------------------------

    def _begin(
        self, frame: Frame, message: Message | Invalid, position: int | None
    ) -> "Reply | Pending":
        # Not `super()`, which costs a twentieth of a call.
        reply = Dispatcher._begin(self, frame, message, position)
        if type(reply) is Success:
            # Only a plain query is answered here, so the message is not `Invalid`.
            id: Any = reply.id
            if type(id) is not int:
                id = row_id(id)
            mark = frame.mark or self._mark
            self._note(clock(), mark, message.method, id, None, position, None)  # type: ignore[arg-type]
        elif position is not None and frame.mark is not None:
            frame.mark.reached = position
        return reply

    async def _finish(
        self,
        frame: Frame,
        message: Message,
        id: Id,
        method: Method,
        position: int | None,
        awaitable: Awaitable[object],
    ) -> Reply:
        frame = self._marked(frame)
        more = More("query", started=clock())
        reply = await super()._finish(frame, message, id, method, position, awaitable)
        if type(reply) is Success:
            self._add(self._mark_of(frame), method.name, id, None, position, more)
        return reply

    def _serve(
        self,
        frame: Frame,
        message: Message,
        method: Method,
        position: int | None,
        filled: Filled | None = None,
    ) -> Coroutine[Any, Any, Reply]:
        return super()._serve(self._marked(frame), message, method, position, filled)

    def _marked(self, frame: Frame) -> Frame:
        """Return a frame with the mark of its message, for a call that may wait.

        Single calls share a frame without one, and `_mark` is that of the newest message.
        """
        if frame.mark is not None:
            return frame
        return msgspec.structs.replace(frame, mark=self._mark)

    def _failure(
        self,
        frame: Frame,
        message: Message,
        method: Method,
        position: int | None,
        error: BaseException,
    ) -> Reply:
        self._failed = None
        reply = super()._failure(frame, message, method, position, error)
        # The log record of the failure has this id.
        more = More("query", "error", started=clock(), call_id=self._failed)
        code = InternalError.CODE
        if reply is not None and not isinstance(reply, Success):
            code = reply.error.code
        self._add(frame.mark or self._mark, method.name, message.id, code, position, more)
        return reply

    def _as_error(self, name: str, ids: Ids, error: BaseException, alone: bool = False) -> RpcError:
        answer = super()._as_error(name, ids, error, alone)
        self._failed = ids.made_call_id
        return answer

    def _refused(
        self, frame: Frame, message: Message | Invalid, position: int | None, error: RpcError
    ) -> Reply:
        name = message.method
        if name is None:
            name = frame.refused
        method = self._methods.get(name)
        kind: Any = None
        if method is not None:
            kind = method.kind.value
        more = More(kind, "error", "no", started=clock(), reason=error.message[:LONGEST])
        mark = frame.mark or self._mark
        self._add(mark, name[:LONGEST], message.id, error.code, position, more)
        return super()._refused(frame, message, position, error)

    def _add(
        self,
        mark: Mark,
        name: str,
        id: Id | UnsetType,
        code: int | None,
        position: int | None,
        more: More,
    ) -> None:
        mark.note(position)
        self._note(clock(), mark, name, row_id(id), code, position, more)

    # --- phases -----------------------------------------------------------------------------------

    def _handler(self, call: Call, context: Context | None) -> Handler:
        return partial(_timed, call, super()._handler(call, context))

    # --- the entry for MCP ------------------------------------------------------------------------

    async def call(self, call: Call, *, has_place: bool = False) -> Raw:
        frame = call.frame
        if frame.mark is None:
            revision = None
            if call.peer is not None:
                revision = call.peer.revision
            frame.mark = array_of(frame.sender) or Mark(
                call.started, frame.sender.caller, _length(call), "mcp", revision=revision
            )
        return await super().call(call, has_place=has_place)

    def plain(
        self, method: Method, params: Raw, shape: Shape, id: Id, *, has_place: bool = False
    ) -> "bytes | Coroutine[Any, Any, bytes] | None":
        mark = Mark(clock(), transport="mcp", bytes=len(params))
        name = f"tools/call:{method.record}"
        try:
            result = super().plain(method, params, shape, id, has_place=has_place)
        except RpcError as error:
            self._add(mark, name, id, error.code, None, More("query", "error", started=mark.begun))
            raise
        if result is None:
            return None
        if isinstance(result, bytes):
            self._note(clock(), mark, name, row_id(id), None, None, None)
            return result
        return self._awaited(mark, name, id, result)

    async def _awaited(
        self, mark: Mark, name: str, id: Id, result: Coroutine[Any, Any, bytes]
    ) -> bytes:
        more = More("query", started=mark.begun)
        code: int | None = None
        try:
            return await result
        except BaseException as error:
            more.outcome = "cancelled"
            if isinstance(error, RpcError):
                more.outcome = "error"
                code = error.code
            raise
        finally:
            self._add(mark, name, id, code, None, more)


class TappedLaxDispatcher(TappedDispatcher, LaxDispatcher):
    """The same for an app that is not strict."""


def _timed(call: Call, handler: Handler) -> object:
    """Call a function, and note when it began and ended."""
    call.entered = clock()
    result = handler()
    if hasattr(result, "__await__"):
        return _timed_to_end(call, result)
    call.left = clock()
    call.result = result
    return result


async def _timed_to_end(call: Call, awaitable: Awaitable[object]) -> object:
    try:
        result = await awaitable
        while hasattr(result, "__await__"):
            result = await result
        # A command reports its end before its result is set.
        call.result = result
        return result
    finally:
        call.left = clock()


def _length(call: Call) -> int:
    if call.params is UNSET:
        return 0
    return len(call.params)
