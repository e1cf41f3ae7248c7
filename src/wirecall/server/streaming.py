"""The entries of one batch whose answers are sent as they come (`answers`).

`Streaming` stands between `run_batch` and the queue of answers, in both directions: it begins the
entries, and it is where `run_batch` puts their outcomes.

1. While the queue is full, no entry begins. In input order, the entry whose answer is due next
   begins nevertheless, because the answers behind it cannot be written before it.
2. When the reader has left, no entry begins, queries are cancelled, and commands run to their end:
   their records are what the reader finds when it comes back.
3. All answers together have at most `Limits.bytes_out` bytes. A result beyond that is replaced by
   its digest, and entries that have not begun are refused.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from types import CoroutineType, NoneType

from msgspec import UNSET, Raw, Struct, structs

from wirecall.answers import Answers
from wirecall.errors import (
    DeadlineExceeded,
    InternalError,
    Ran,
    ResponseTooLarge,
    ResultNotRetained,
    RpcError,
)
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Answer, Failure, Id, Invalid, Message, Success, failure
from wirecall.protocol.receipt import Receipt
from wirecall.server.call import Frame
from wirecall.server.linking import Begin, Outcome
from wirecall.server.method import Method

# Seconds after which entries that do not wait let the reader write what is ready. Every fourth
# entry looks at the clock.
TURN = 0.005

# Results that a stream encodes when it writes them, and the bytes that each counts for.
_SHORT = frozenset({int, bool, NoneType})
SMALL = 64
# How many of them are passed on together.
TOGETHER = 16
# Stands for the outcome of an entry whose answer was gathered.
GATHERED = Success(None, None)

# Bytes. A shorter error is sent even if there is no room for it.
SHORT = 1024


class _Command(Struct, eq=False):
    """What a stream keeps about one command."""

    # The delivery of its answer.
    receipt: Receipt
    # Has its id if the answer came from the ledger.
    replayed: list[Id]


class Streaming:
    """Begins the entries of one batch, and passes their answers to a queue."""

    def __init__(
        self,
        answers: Answers,
        messages: Sequence[Message | Invalid],
        methods: Mapping[str, Method],
        begin: Begin,
        seal: Callable[[Answer], bytes],
        most_bytes: int,
    ) -> None:
        self._answers = answers
        self._messages = messages
        self._methods = methods
        self._begin = begin
        self._seal = seal
        self._most_bytes = most_bytes
        # The bytes that answers may still take.
        self._room = most_bytes
        # Whether a result did not fit.
        self._is_over = False
        # Short answers of entries that did not wait. Nothing can read them before the next wait, so
        # they are passed on together.
        self._at_once: list[object] = []
        self._gathers = not answers.in_input_order
        # The position of the last entry.
        self._last = len(messages) - 1
        # The positions of the commands that have begun.
        self._begun: set[int] = set()
        self._ended = [False] * len(messages)
        self._commands: dict[int, _Command] = {}
        # The tasks in which queries wait.
        self._queries: set[asyncio.Task[object]] = set()
        # Those of them that were cancelled, because the reader has left.
        self._aborted: set[asyncio.Task[object]] = set()
        answers.entries_left = len(messages)
        answers.owes_answers = any(_owes_answer(message) for message in messages)
        answers.seal = seal
        answers.on_close = self._abort_queries

    # --- entries begin ----------------------------------------------------------------------------

    def begin(self, frame: Frame, message: Message | Invalid, position: int) -> Outcome:
        """Return the outcome of an entry, or a coroutine of it, as `run_batch` asks."""
        answers = self._answers
        if type(message) is not Invalid:
            method = self._methods.get(message.method)
            # A command may be put aside, and begin much later than this.
            if method is not None and method.is_command:
                self._pass_on()
                return self._begin_later(frame, message, position)
        if answers.is_full or answers.is_closed or self._is_over:
            self._pass_on()
            return self._begin_later(frame, message, position)
        if not position & 3 and time.perf_counter() - answers.taken_at > TURN:
            self._pass_on()
            if answers.ready:
                return self._begin_after_a_turn(frame, message, position)
        outcome = self._begin(frame, message, position)
        if type(outcome) is CoroutineType:
            self._pass_on()
            return self._query(outcome)
        # `run_batch` puts it in now.
        if (
            self._gathers
            and position < self._last
            and type(outcome) is Success
            and type(outcome.result) in _SHORT
            and self._room > SHORT
        ):
            self._ended[position] = True
            self._room -= SMALL
            self._at_once.append(outcome)
            if len(self._at_once) >= TOGETHER:
                self._pass_on()
            return GATHERED
        return outcome

    def _pass_on(self) -> None:
        """Pass on the answers that were gathered."""
        if self._at_once:
            self._answers.put_all(self._at_once, SMALL * len(self._at_once))
            self._at_once = []

    def _is_command(self, message: Message | Invalid) -> bool:
        if isinstance(message, Invalid):
            return False
        method = self._methods.get(message.method)
        return method is not None and method.is_command

    def _must_wait(self, position: int) -> bool:
        answers = self._answers
        if answers.is_closed or not answers.is_full:
            return False
        is_due = answers.in_input_order and position == answers.next
        return not is_due

    async def _begin_later(
        self, frame: Frame, message: Message | Invalid, position: int
    ) -> Answer | None:
        """Begin an entry when there is room for its answer."""
        while self._must_wait(position):
            await self._answers.until_changed()
        outcome = self._begin_now(frame, message, position)
        if type(outcome) is CoroutineType:
            answer: Answer | None = await outcome
            return answer
        assert outcome is None or isinstance(outcome, (Success, Failure))
        return outcome

    async def _begin_after_a_turn(
        self, frame: Frame, message: Message | Invalid, position: int
    ) -> Answer | None:
        await asyncio.sleep(0)
        return await self._begin_later(frame, message, position)

    def _begin_now(self, frame: Frame, message: Message | Invalid, position: int) -> Outcome:
        if self._answers.is_closed:
            return None
        if self._is_over and _owes_answer(message):
            return failure(_id_of(message), self._too_large())
        if self._is_command(message):
            self._begun.add(position)
            command = _Command(self._answers.whole.part(), [])
            self._commands[position] = command
            sender = structs.replace(frame.sender, receipt=command.receipt)
            own = structs.replace(frame, sender=sender, replayed=command.replayed)
            return self._begin(own, message, position)
        outcome = self._begin(frame, message, position)
        if type(outcome) is CoroutineType:
            return self._query(outcome)
        return outcome

    async def _query(
        self, outcome: "CoroutineType[object, object, Answer | None]"
    ) -> Answer | None:
        """Await the outcome of a query, which is cancelled when the reader leaves."""
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._queries.add(task)
        try:
            answer = await outcome
        except asyncio.CancelledError:
            self._queries.discard(task)
            self._take_back(task)
            if task.cancelling() > before or not self._answers.is_closed:
                raise
            return None
        self._queries.discard(task)
        self._take_back(task)
        return answer

    def _abort_queries(self) -> None:
        for task in self._queries:
            self._aborted.add(task)
            task.cancel()

    def _take_back(self, task: "asyncio.Task[object]") -> None:
        """Take back a cancel of this class: the task continues with other entries."""
        if task in self._aborted:
            self._aborted.discard(task)
            task.uncancel()

    # --- entries end ------------------------------------------------------------------------------

    def __setitem__(self, position: int, reply: Answer | None) -> None:
        """Take the outcome of an entry from `run_batch`."""
        if reply is GATHERED:
            return
        self._pass_on()
        self._ended[position] = True
        if reply is None:
            self._answers.put(position, None)
            return
        data = self._seal(reply)
        if len(data) > self._room:
            data = self._shortened(reply, data)
        self._room -= len(data)
        if position in self._commands:
            self._put_command(position, data)
        else:
            self._answers.put(position, Raw(data), len(data))

    def _put_command(self, position: int, data: bytes) -> None:
        """Pass on the answer of a command, with its receipt and its mark."""
        command = self._commands.pop(position)
        if command.replayed:
            self._answers.replayed.extend(command.replayed)
            if self._answers.marks_replays:
                data = data[:-1] + b',"replayed":true}'
        receipt: Receipt | None = None
        if command.receipt.listeners:
            receipt = command.receipt
        self._answers.put(position, Raw(data), len(data), receipt)

    def _shortened(self, reply: Answer, data: bytes) -> bytes:
        """Return the error that replaces an answer that does not fit. A short error is kept."""
        if isinstance(reply, Failure) and len(data) <= SHORT:
            return data
        self._is_over = True
        return self._seal(failure(reply.id, self._not_sent(reply)))

    def _not_sent(self, reply: Answer) -> RpcError:
        """Return the error that replaces an answer that does not fit."""
        reason = f"the answers of this batch are longer than {self._most_bytes} bytes"
        if isinstance(reply, Failure):
            error = reply.error
            ran = RpcError(error.code, "", error.data).ran
            return InternalError(reason, type="limit_exceeded", limit="bytes_out", ran=ran)
        result = reply.result
        if not isinstance(result, Raw):
            result = Raw(frames.encode(result))
        digest = sha256(bytes(result)).hexdigest()
        return ResultNotRetained(
            reason, ran="yes", digest=digest, limit="bytes_out", max=self._most_bytes
        )

    def _too_large(self) -> RpcError:
        return ResponseTooLarge(
            f"the answers of this batch are longer than {self._most_bytes} bytes: "
            "send this call in another batch",
            ran="no",
            limit="bytes_out",
            max=self._most_bytes,
        )

    def fail(self, error: BaseException) -> None:
        """Answer every entry that has no answer: the server failed, or it stops."""
        self._pass_on()
        for position, message in enumerate(self._messages):
            if self._ended[position]:
                continue
            command = self._commands.pop(position, None)
            if command is not None:
                command.receipt.forfeit()  # what is sent now is not its outcome
            self._ended[position] = True
            if _owes_answer(message):
                data = self._seal(failure(_id_of(message), self._interrupted(position, error)))
                self._answers.put(position, Raw(data), len(data))
            else:
                self._answers.put(position, None)

    def _interrupted(self, position: int, error: BaseException) -> RpcError:
        ran: Ran = "no"
        if position in self._begun:
            ran = "unknown"
        if isinstance(error, asyncio.CancelledError):
            return DeadlineExceeded("the server stops", ran=ran)
        return InternalError(ran=ran)


def _owes_answer(message: Message | Invalid) -> bool:
    return isinstance(message, Invalid) or message.id is not UNSET


def _id_of(message: Message | Invalid) -> Id:
    if message.id is UNSET:
        return None
    return message.id
