"""Tasks: calls of tools that continue after the server's answer.

The extension io.modelcontextprotocol/tasks (SEP-2663) defines them.

    task = await client.start_tool("render", {"film": "x"})
    async for state in task: ...
    result = await task

1. The client polls the state (`tasks/get`) at the server's interval, from `SOONEST` to `FURTHEST`
   seconds, plus or minus a tenth. If the server pushes states (`subscriptions/listen`), the client
   polls every `FURTHEST` seconds.
2. A lost answer, or a server that cannot be reached, does not end the wait: the task still runs.
   The deadline ends it, and so does a server that does not know the task.
3. The host's handlers answer the questions of a task, each key once. The client repeats an answer
   until the server has accepted it.
4. The end of a task settles the entry of its call, like a plain answer. A task that has ended does
   not change.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from wirecall.aio import cancel_all
from wirecall.client.delivery import LEAST, asked_pause, may_help
from wirecall.client.exchange import Entry
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    InvalidParams,
    RpcError,
    TaskCancelled,
    TaskGone,
    TimedOut,
    UsageError,
)
from wirecall.mcp.client.inbox import ROUNDS, Changes, InputRequest
from wirecall.protocol.messages import UNREADABLE, ErrorObject, JsonObject, remote_error

if TYPE_CHECKING:
    from wirecall.mcp.client.conversation import Conversation

T = TypeVar("T")
Status: TypeAlias = Literal["working", "input_required", "completed", "failed", "cancelled"]

# Seconds between two polls of a task.
SOONEST = 0.1
FURTHEST = 60.0
USUAL = 1.0  # the same, if the server does not set an interval
LONGEST_ID = 4096  # characters: a header carries the id


class TaskState(Struct, frozen=True):
    """A task at one moment. The times are as the server writes them (ISO 8601)."""

    id: Annotated[str, Meta(min_length=1, max_length=LONGEST_ID)] = msgspec.field(name="taskId")
    status: Status
    message: str | None = msgspec.field(default=None, name="statusMessage")
    created: str | None = msgspec.field(default=None, name="createdAt")
    updated: str | None = msgspec.field(default=None, name="lastUpdatedAt")
    ttl_ms: int | None = msgspec.field(default=None, name="ttlMs")


class Details(TaskState, frozen=True, rename="camel"):
    """A state with all its members. A member that does not belong to the status is ignored."""

    poll_interval_ms: Raw = Raw(b"null")
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET
    input_requests: Raw | UnsetType = UNSET
    meta: JsonObject | None = msgspec.field(default=None, name="_meta")

    @property
    def shown(self) -> TaskState:
        return TaskState(
            self.id, self.status, self.message, self.created, self.updated, self.ttl_ms
        )

    @property
    def interval(self) -> float:
        """The seconds until the next poll.

        The interval is a hint, so a malformed one is ignored.
        """
        try:
            wish = msgspec.json.decode(self.poll_interval_ms, type=float) / 1000
        except UNREADABLE:
            return USUAL
        return min(max(wish, SOONEST), FURTHEST)


_decode = msgspec.json.Decoder(Details).decode
_decode_error = msgspec.json.Decoder(ErrorObject).decode
_decode_questions = msgspec.json.Decoder(dict[str, InputRequest]).decode


def read_state(raw: Raw | bytes) -> Details:
    """Return the state in the answer to `tools/call` or `tasks/get`, or in a notification."""
    try:
        return _decode(raw)
    except UNREADABLE as error:
        raise BadAnswer(f"the state of a task cannot be read: {error}") from None


def _questions_of(state: Details) -> dict[str, InputRequest]:
    if state.input_requests is UNSET:
        return {}
    try:
        return _decode_questions(state.input_requests)
    except UNREADABLE as error:
        raise BadAnswer(f"the questions of a task cannot be read: {error}") from None


class Task(Generic[T]):
    """A call of a tool that may still be running.

    `await` it for the result, or iterate over its states.
    """

    def __init__(
        self,
        conversation: "Conversation",
        entry: Entry[T],
        id: str | None,
        state: Details | None = None,
    ) -> None:
        # None: the server answered at once, so there is no task.
        self.id = id
        self._conversation = conversation
        # The entry of the call. Its result is the task's.
        self._entry = entry
        self._state = state
        if id is None:
            self._state = Details("", "completed")
        # The server has pushed a state.
        self._is_sent = False
        # One event for each waiting caller.
        self._news: list[asyncio.Event] = []
        # The keys of all questions that were answered, or that are being answered.
        self._asked: set[str] = set()
        # Answers that the server has not accepted yet, by key.
        self._answers: JsonObject = {}
        self._rounds = 0

    @property
    def status(self) -> Status | None:
        """The last known status; None: not known yet."""
        if self._state is None:
            return None
        return self._state.status

    @property
    def message(self) -> str | None:
        """The server's message about the status."""
        if self._state is None:
            return None
        return self._state.message

    @property
    def questions(self) -> dict[str, InputRequest]:
        """The last known questions that the task waits for, by key."""
        state = self._state
        if state is None or state.status != "input_required":
            return {}
        return _questions_of(state)

    @property
    def is_over(self) -> bool:
        """Whether the task has ended, and the client has its result or error."""
        return self._entry.is_settled

    def __repr__(self) -> str:
        return f"<Task {self.id!s:.100} {self.status}>"

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> T:
        """Wait for the result, and return it like `call_tool`.

        The task continues after `timeout` seconds.
        """
        if timeout is not None and not timeout > 0:
            raise UsageError(f"timeout must be greater than 0, got {timeout!r}.")
        patience = math.inf if timeout is None else timeout
        async for _ in self.watch(self._conversation.delivery.clock.time() + patience, patience):
            pass
        return self._entry.result()

    def __aiter__(self) -> AsyncGenerator[TaskState, None]:
        return self.watch()

    async def refresh(self) -> TaskState:
        """Ask the server for the state, and return it."""
        if not self.is_over:
            await self._look(None)
        assert self._state is not None
        return self._state.shown

    async def cancel(self) -> None:
        """Ask the server to cancel the task. It may still finish: the server decides."""
        if not self.is_over:
            try:
                await self._conversation.perform("tasks/cancel", {"taskId": self.id})
            except InvalidParams as error:
                raise self._gone(error) from None

    # --- waiting ----------------------------------------------------------------------------------

    async def watch(
        self, deadline: float = math.inf, patience: float = math.inf
    ) -> AsyncGenerator[TaskState, None]:
        """Yield the state, and another one when it changes, until the task is over.

        A change is another status or message. This also answers questions; each round of answers
        restarts the `patience` seconds.
        """
        delivery = self._conversation.delivery
        news = asyncio.Event()
        clock = delivery.clock
        shown = None
        asked_for = 0.0
        # The answer to `tools/call` has no questions and no result.
        is_due = self.status != "working"
        stream: Changes | None = None
        may_listen = True
        self._news.append(news)
        self._conversation.waiting.append(self)
        try:
            while True:
                # 1. The state.
                news.clear()
                if is_due and not self.is_over and deadline - clock.time() >= LEAST:
                    try:
                        await self._look(deadline)
                        asked_for = 0.0
                    except (CallFailed, RpcError) as error:
                        asked_for = self._pause_after(error)
                state = self._state
                if state is not None and (state.status, state.message) != shown:
                    shown = (state.status, state.message)
                    yield state.shown
                if self.is_over:
                    return
                # 2. Its questions.
                if state is not None and state.status == "input_required":
                    deadline = await self._answer(state, deadline, patience)
                # 3. A pause: until the server pushes a state, or the next poll is due. Replace a
                #    stream that has ended only then: some servers end each stream at once.
                if self._conversation.is_over:
                    raise ConnectionLost(
                        f"the client was closed before task {self.id!s:.100} was over"
                    )
                left = deadline - clock.time()
                if left < LEAST:
                    raise TimedOut(
                        f"task {self.id!s:.100} was not over within {round(patience, 2):g} s"
                    )
                if stream is not None and stream.is_over:
                    await stream.__aexit__()
                    stream = None
                if stream is None:
                    self._is_sent = False
                    if may_listen:
                        stream = await self._conversation.stream_of(str(self.id), left)
                interval = max(self._interval(state), asked_for)
                pause = min(FURTHEST, interval) * (0.9 + 0.2 * delivery.options.chance())
                is_due = await self._pause(min(pause, left), news, stream)
                may_listen = is_due
        except (CallFailed, RpcError) as error:
            error.ran = "unknown"  # a request about the task failed; the call itself may have run
            raise
        finally:
            self._news.remove(news)
            self._conversation.waiting.remove(self)
            if stream is not None:
                await stream.__aexit__()

    def _interval(self, state: Details | None) -> float:
        """Return the seconds between two polls."""
        if self._is_sent:
            return FURTHEST
        if state is None:
            return USUAL
        return state.interval

    async def _pause(self, seconds: float, news: asyncio.Event, stream: Changes | None) -> bool:
        """Wait until there is news, or the stream of states ends, or the time is over.

        Return whether the time is over.
        """
        loop = asyncio.get_running_loop()
        sleeping = loop.create_task(self._conversation.delivery.clock.sleep(seconds))
        waits: list[asyncio.Task[Any]] = [sleeping, loop.create_task(news.wait())]
        if stream is not None:
            waits.append(loop.create_task(stream.__anext__()))  # it only ends
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(*waits)
        return not sleeping.cancelled()

    def receive(self, raw: Raw) -> None:
        """Take a state that the server has pushed. If it is unusable, the next poll replaces it."""
        self._is_sent = False
        with suppress(BadAnswer):
            self._take(read_state(raw))
            self._is_sent = True
        self.wake()

    def wake(self) -> None:
        """Wake the waiting callers to check the state again."""
        for news in self._news:
            news.set()

    async def _look(self, deadline: float | None) -> None:
        try:
            state = await self._conversation.ask(
                "tasks/get", {"taskId": self.id}, read_state, self._time_to(deadline)
            )
        except InvalidParams as error:
            # An id that is unknown, expired or another caller's MUST be answered with -32602
            # (SEP-2663, "Protocol Errors").
            raise self._gone(error) from None
        self._take(state)

    def _take(self, state: Details) -> None:
        """Take a state of the task; a final one settles the entry of the call."""
        if self.is_over:
            return
        if state.id != self.id:
            raise BadAnswer(f"the server sent the state of another task: {state.id[:100]!a}")
        if state.status == "completed":
            if state.result is UNSET:
                raise BadAnswer(f"task {state.id[:100]} is completed, and has no result")
            self._entry.succeed(state.result)
        elif state.status == "failed":
            try:
                raw = Raw(b"null") if state.error is UNSET else state.error
                error = _decode_error(raw)
            except UNREADABLE as misfit:
                raise BadAnswer(
                    f"task {state.id[:100]} has failed, and its error cannot be read: {misfit}"
                ) from None
            self._entry.fail(remote_error(error))
        elif state.status == "cancelled":
            self._entry.fail(
                TaskCancelled(
                    f"task {state.id[:100]} was cancelled: {(state.message or '')[:1000]}".rstrip(
                        ": "
                    )
                )
            )
        self._state = state

    async def _answer(self, state: Details, deadline: float, patience: float) -> float:
        """Answer the questions of a task, and return the deadline.

        It is a new one if a person may have taken time.
        """
        asked = _questions_of(state)
        # A key is one question for the life of the task, so it is shown once (SEP-2663, "Task
        # Update Requests").
        new = {key: question for key, question in asked.items() if key not in self._asked}
        if new:
            self._rounds += 1
            if self._rounds > ROUNDS:
                raise BadAnswer(f"task {state.id[:100]} still asks after {ROUNDS} rounds")
            self._asked |= new.keys()
            try:
                self._answers |= await self._conversation.answers(new)
            except BaseException:
                self._asked -= new.keys()
                raise
            deadline = self._conversation.delivery.clock.time() + patience
        if self._answers:
            sent = self._answers
            self._answers = {}
            is_taken = False
            params = {"taskId": self.id, "inputResponses": sent}
            try:
                await self._conversation.ask(
                    "tasks/update", params, lambda _raw: None, self._time_to(deadline)
                )
                is_taken = True
            except InvalidParams as refusal:
                # Raises if the task is gone; else an answer does not fit its question.
                await self._look(deadline)
                raise refusal
            except (CallFailed, RpcError) as error:
                self._pause_after(error)
            finally:
                if not is_taken:
                    self._answers = {**sent, **self._answers}
        return deadline

    def _time_to(self, deadline: float | None) -> float | None:
        """Return the timeout of one request, in seconds; None: the default."""
        if deadline is None:
            return None
        left = deadline - self._conversation.delivery.clock.time()
        return max(LEAST, min(left, self._conversation.delivery.options.timeout))

    def _pause_after(self, error: CallFailed | RpcError) -> float:
        """Return the pause that the server asks for, if the error is temporary; raise any other."""
        if not may_help(error):
            raise error
        return asked_pause(error)

    def _gone(self, error: InvalidParams) -> TaskGone:
        return TaskGone(f"the server does not know task {self.id!s:.100}: {error}")
