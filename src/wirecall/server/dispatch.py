"""The seven steps from bytes to bytes.

    1 parse    protocol.messages.read  bytes -> one message or a batch
    2 admit    Policy.admit            message -> Call, or the error that answers it
    3 guard    middleware              once per entry: single calls, batch entries and notifications
    4 bind     the method's signature  raw params -> arguments
    5 claim    commands                commands with a key: run, wait, replay or refuse
    6 invoke   the function            its result is encoded once, to be recorded and sent
    7 reply    Dispatcher._seal        answers -> bytes or nothing, in input order

`Dispatcher.handle` takes all steps for JSON-RPC. `Dispatcher.run` takes steps 3 to 6 for both
JSON-RPC and MCP. A plain query that no middleware and no log sees takes a short path: `_begin` for
JSON-RPC, `plain` for MCP.

No step calls an earlier one. An `RpcError` at any step becomes the answer of its entry. Any other
exception is logged with the call's correlation id and becomes -32603, without details on the wire
(J15).
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from logging import INFO
from types import CoroutineType, NoneType
from typing import Any, Protocol, TypeAlias

from msgspec import UNSET, Raw, UnsetType, structs

from wirecall.aio import (
    cancels,
    in_thread,
    is_closing,
    needs_loop,
    resume,
    run_now,
    settled,
    timed,
)
from wirecall.answers import Answers
from wirecall.errors import (
    Busy,
    CannotWait,
    DeadlineExceeded,
    InternalError,
    InvalidParams,
    MethodNotFound,
    Mistake,
    OtherLoop,
    ResultMisfit,
    RpcError,
    UsageError,
    suggested,
)
from wirecall.ledger.base import RecordId
from wirecall.logs import CURRENT, failed, logger, watch_ids
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import (
    Answer,
    Data,
    Failure,
    Id,
    Invalid,
    Message,
    Success,
    failure,
    make_batch,
    make_reply,
)
from wirecall.protocol.params import place_of
from wirecall.protocol.receipt import Receipt
from wirecall.protocol.sender import ANONYMOUS, ANYONE, Sender
from wirecall.server.batch import run_batch
from wirecall.server.call import (
    Call,
    Events,
    Frame,
    Handler,
    InputRequired,
    Mark,
    Shape,
    log_refusal,
    ran_if_interrupted,
    shape_of,
    with_true_ran,
)
from wirecall.server.context import Context, Middleware, Next, call_of
from wirecall.server.home import Home
from wirecall.server.identity import Identity, Permit
from wirecall.server.ids import Ids
from wirecall.server.lifespan import Lifespan
from wirecall.server.linking import Begin, Filled, Linking, without_links
from wirecall.server.method import BatchRefusal, Execution, Method, Registry
from wirecall.server.policy import Policy, fingerprint
from wirecall.server.streaming import Streaming

Reply: TypeAlias = Answer | None  # None for a notification
Pending: TypeAlias = Coroutine[Any, Any, Reply]

# Results that cannot change between the end of their call and the writing of the reply, so one
# encode serves all. A float is not among them, since JSON does not have NaN or the infinities.
_CONSTANT = frozenset({int, str, bool, NoneType})
_SHORT = _CONSTANT - {str}

# A shorter result is not counted against `Limits.bytes_out` before the reply is written: 50 of them
# take little memory.
COUNTED = 1024

# Entries of a refused batch that get an error each, if the app asks for that. It is the largest
# array that common clients send; a larger one gets one error, so that a short message does not
# cause a long answer.
MOST_REFUSED = 1000

# Milliseconds after which a caller that was refused for the load should call again.
BUSY_RETRY_MS = 100

# Seconds. `wirecall dev` warns if a step of a handler blocks the event loop longer.
BLOCKS = 0.1

# Entries of a batch for which an unknown method's nearest name is suggested.
SUGGESTED = 3

_NULL = Raw(b"null")


class Executor(Protocol):
    """Runs commands that have a record.

    `commands.commands.Commands` implements it. It is a protocol, since `server` is below `commands`
    and must not import it.
    """

    # The number of commands that continue although their callers have left.
    left: int

    def execute(self, call: Call, handler: Handler) -> Coroutine[Any, Any, Raw]: ...
    def hand_over(
        self, run: Any, id: str, document: bytes, ttl: float
    ) -> Coroutine[Any, Any, bool]: ...
    def cancel(self, id: RecordId) -> None: ...
    def open(self) -> None: ...
    def start(self, work: Coroutine[Any, Any, None]) -> None: ...

    async def aclose(self, grace: float) -> None: ...


class Dispatcher:
    """Serves the methods of a registry."""

    # Messages are read as JSON-RPC 2.0 defines them.
    _strict = True

    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        commands: Executor,
        events: Events,
        *,
        middleware: Sequence[Middleware] = (),
        execution: Execution | None = None,
        batch_refusal: BatchRefusal = "single",
        permit: Permit | None = None,
        lifespan: Lifespan | None = None,
        warns_blocking: bool = False,
        in_development: bool = False,
        shows: Callable[[Method, Identity | None], bool] = lambda _method, _identity: True,
        references: bool = False,
    ) -> None:
        self._methods = registry.methods
        self._policy = policy
        self.commands = commands
        self._events = events
        self._is_observed = bool(middleware) or execution == "sequential" or warns_blocking
        self._in_full = self._is_observed
        # A `CallIds` or a `JsonFormatter` may write the ids of the running call into a record.
        self._shows_ids = False
        self._guarded: Next | None = None
        self._around = _checked_around if in_development else _around
        self._middleware = middleware
        if middleware:
            self._guarded = self._guard(self._invoke_in)
        # The same for the methods of each mounted app.
        self._guards: dict[Home, Next] = {}
        self._execution = execution
        self._refuses_each = batch_refusal == "entries"
        # Entries of a batch may refer to earlier ones.
        self._has_references = references
        self._permit = permit
        self._shows = shows
        self._lifespan = lifespan
        # The methods that have blocked the event loop. None: the steps of handlers are not timed.
        self._blocking: set[Method] | None = None
        if warns_blocking:
            self._blocking = set()
        # The number of calls that wait for something.
        self._in_flight = 0
        # The same by caller. None: one caller may take all places.
        self._held: Counter[str] | None = None
        if policy.limits.in_flight_per_caller < policy.limits.in_flight:
            self._held = Counter()
        # Set when no call is in flight. None: `drain` does not wait for that.
        self._idle: asyncio.Event | None = None
        # The frame of a single call is only read, so anonymous calls without a log share two: with
        # a loop, and without.
        self._single_user = policy.has_single_user
        self._quiet = [
            Frame(ANYONE, alone, self._in_full, events.observed, single_user=self._single_user)
            for alone in (False, True)
        ]
        watch_ids(self)

    def ids_asked(self, has_filter: bool, has_formatter: bool) -> None:
        """Give ids to plain queries too while a `CallIds` filter asks for them.

        The short path has none.
        """
        self._shows_ids = has_filter or has_formatter
        self._in_full = self._is_observed or has_filter
        for frame in self._quiet:
            frame.in_full = self._in_full

    # complexity: the steps of every message in order; a further function would slow each call.
    def handle(
        self,
        data: Data,
        sender: Sender = ANYONE,
        alone: bool = False,
        replayed: list[Id] | None = None,
        key: str | None = None,
        answers: Answers | None = None,
    ) -> "bytes | Coroutine[Any, Any, bytes | None] | None":
        """Return the reply: at once if nothing waits, else as a coroutine.

        A coroutine costs a quarter of a call. `alone` says that there is no event loop, so nothing
        may wait. A list given as `replayed` receives the ids of the answers that came from the
        ledger. `key` is that of a single call. `answers` takes those of a batch as they come: then
        the coroutine returns nothing.
        """
        # `Any`, since type checkers do not follow `type(read) is list`; `isinstance` costs a few
        # per cent.
        read: Any = frames.read(data, self._policy.limits, self._strict)
        is_batch = type(read) is list
        if key is not None and is_batch:
            raise UsageError(
                "handle(array, key=...): a key beside a message belongs to a single call.",
                "with one key for all, every entry would be a repetition of the first, or refused",
                "give each entry its own: params.idempotency_key",
            )
        if self._permit is not None and sender.identity is not None:
            self._permit(sender.identity, self._scopes(read if is_batch else [read]))
        if self._in_flight or self.commands.left:
            entries = read if is_batch else [read]
            try:
                self._check_load(sender.caller, len(entries))
            except Busy as refusal:
                return _refused_reply(entries, is_batch, refusal)
        logged = logger.isEnabledFor(INFO)
        is_bare = sender is ANYONE and replayed is None and key is None
        if is_batch or logged or not (is_bare or self._is_plain(read)):
            frame = self._frame(sender, alone, logged, replayed, key)
            if logged and type(read) is Invalid:
                frame.refused = shape_of(frames.as_bytes(data))
        else:
            frame = self._quiet[alone]
        if is_batch:
            if answers is not None:
                return self._stream_all(frame, read, answers)
            frame.room = self._policy.limits.bytes_out
            later = self._reply_all(frame, read)
        else:
            reply = self._begin(frame, read, None)
            if type(reply) is Success:
                return self._seal(reply)
            if type(reply) is Failure:
                return self._seal_refusal(read, reply)
            if reply is None:
                return None
            try:
                later = self._reply_later(sender.caller, resume(reply, reply.send(None)))
            except StopIteration as finished:  # it did not wait
                return self._seal_if_owed(finished.value)
        if alone:
            return run_now(later)
        return later

    def _scopes(self, entries: Sequence[Message | Invalid]) -> dict[str, None]:
        """Return the scopes that the entries of a message ask for, each once.

        The scopes of all entries are checked before one of them runs: a client that gets more scope
        sends the whole message again. A replay is checked as well, since this precedes the claim.
        """
        asked: dict[str, None] = {}
        for entry in entries:
            if isinstance(entry, Invalid):
                if entry.linked is None or not self._has_references:
                    continue
                entry = entry.linked.request
            method = self._methods.get(entry.method)
            if method is not None and method.scopes is not None:
                asked.update(dict.fromkeys(method.scopes.of(entry.params)))
        return asked

    def _is_plain(self, read: Message | Invalid) -> bool:
        """Return whether a single message is a plain query, which does not read its frame."""
        if self._in_full or type(read) is Invalid or read.id is UNSET:
            return False
        method = self._methods.get(read.method)
        return method is not None and method.plain

    def _frame(
        self,
        sender: Sender,
        alone: bool,
        logged: bool,
        replayed: list[Id] | None,
        key: str | None,
    ) -> Frame:
        in_full = logged or self._in_full
        reported = logged or self._events.observed
        return Frame(
            sender,
            alone,
            in_full,
            reported,
            logged,
            key,
            replayed,
            single_user=self._single_user,
        )

    async def _reply_later(self, caller: str, begun: Awaitable[Reply]) -> bytes | None:
        """Return the reply to a single call that waits."""
        self._count(1, caller)
        try:
            return self._seal_if_owed(await begun)
        finally:
            self._count(-1, caller)

    async def _reply_all(self, frame: Frame, messages: list[Message | Invalid]) -> bytes | None:
        """Return the reply to a batch."""
        unwatched: Receipt | None = None
        sent = messages
        replies: list[Reply] | None = None
        self._count(len(messages), frame.sender.caller)
        try:
            concurrency = self._policy.limits.concurrency
            if frame.alone:
                concurrency = 1
            # Unwatched: its answers count as delivered when this coroutine returns.
            if frame.sender.receipt is None:
                unwatched = Receipt()
                frame.sender = structs.replace(frame.sender, receipt=unwatched)
            begin = self._begin_batch(frame, len(messages))
            if self._has_references and Invalid in map(type, messages):
                begin = self._linking(frame, messages).begin
                messages = [without_links(message) for message in messages]
            replies = await run_batch(
                frame, messages, begin, self._in_lane, concurrency=concurrency
            )
            # A batch of notifications gets no answer at all, not even an empty array (JSON-RPC 2.0,
            # section 6; J7).
            owed: list[Answer] = list(filter(None, replies))
            sealed: bytes | None = None
            if owed:
                sealed = self._seal(owed)
            if unwatched is not None:
                unwatched.written()
            return sealed
        finally:
            self._count(-len(messages), frame.sender.caller)
            self._end_batch(frame, sent, is_complete=replies is not None)
            if unwatched is not None:
                unwatched.lost()

    async def _stream_all(
        self, frame: Frame, messages: list[Message | Invalid], answers: Answers
    ) -> None:
        """Put the answers to a batch into a queue, each when its entry ends."""
        begin = self._begin_batch(frame, len(messages), measured=True)
        if self._has_references and Invalid in map(type, messages):
            begin = self._linking(frame, messages).begin
            messages = [without_links(message) for message in messages]
        limits = self._policy.limits
        streaming = Streaming(
            answers, messages, self._methods, begin, self._seal_record, limits.bytes_out
        )
        self._count(len(messages), frame.sender.caller)
        try:
            await run_batch(
                frame,
                messages,
                streaming.begin,
                self._in_lane,
                concurrency=limits.concurrency,
                into=streaming,
            )
        except asyncio.CancelledError as error:
            streaming.fail(error)
            raise
        except Exception as error:
            ids = Ids(None)
            failed("a batch", ids.correlation_id, error, ids=ids.facts())
            streaming.fail(error)
        finally:
            self._count(-len(messages), frame.sender.caller)
            self._end_batch(frame, [], is_complete=False)
            answers.finish()

    def begin_array(self, sender: Sender, size: int) -> Mark | None:
        """Return what the rows of an MCP array share; None without a tap."""
        return None

    def _begin_batch(self, _frame: Frame, _size: int, *, measured: bool = False) -> Begin:
        """Return what begins the entries of a batch; `measured`: each of them has its own times."""
        return self._begin

    def _end_batch(
        self, frame: Frame, messages: list[Message | Invalid], *, is_complete: bool
    ) -> None:
        """Called when the reply to a batch is complete, or never will be."""

    def _linking(self, _frame: Frame, messages: list[Message | Invalid]) -> Linking:
        """Return the order of a batch whose entries refer to each other."""
        return Linking(messages, self._methods, self._begin, self._serve)

    def _in_lane(self, message: Message | Invalid) -> bool:
        """Return whether an entry of a batch begins only after the earlier ones of its lane."""
        if isinstance(message, Invalid):
            return False
        method = self._methods.get(message.method)
        if method is None:  # it was removed a moment ago
            return False
        # As in `is_in_lane`, without a further call.
        execution = method.execution or self._execution
        if execution is None:
            return method.is_command
        return execution == "sequential"

    def is_in_lane(self, method: Method) -> bool:
        """Return whether the entries of a batch that call a method run one after another."""
        execution = method.execution or self._execution
        if execution is None:
            return method.is_command
        return execution == "sequential"

    @property
    def in_flight(self) -> int:
        """The number of calls that wait for something, with those whose callers have left."""
        return self._in_flight + self.commands.left

    async def aclose(self, grace: float) -> None:
        """Finish or release the commands that are in flight."""
        await self.commands.aclose(grace)

    async def drain(self, timeout: float) -> None:
        """Wait until no call is in flight, for `timeout` seconds at most."""
        if not self._in_flight:
            return
        self._idle = self._idle or asyncio.Event()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("stopping with %d calls in flight", self._in_flight)
        self._idle = None

    def _check_load(self, caller: str, count: int) -> None:
        """Raise `Busy` if so many calls of a caller do not fit beside those in flight.

        A message that comes alone always fits, even a batch that has more entries than there are
        places. Anonymous calls are not counted by caller: they have no name.
        """
        busy = self._in_flight + self.commands.left
        if not busy:
            return
        limits = self._policy.limits
        is_full = busy + count > limits.in_flight
        if not is_full and self._held is not None:
            held = self._held[caller]
            is_full = held > 0 and held + count > limits.in_flight_per_caller
        if is_full:
            raise Busy(ran="no", retry_after_ms=BUSY_RETRY_MS)

    def _count(self, number: int, caller: str) -> None:
        """Count calls that begin, or that end if `number` is negative."""
        self._in_flight += number
        if self._held is not None and caller != ANONYMOUS:
            self._held[caller] += number
            if self._held[caller] == 0:
                del self._held[caller]
        if self._idle is not None and not self._in_flight:
            self._idle.set()

    # --- one entry of JSON-RPC --------------------------------------------------------------------

    def _begin(
        self, frame: Frame, message: Message | Invalid, position: int | None
    ) -> "Reply | Pending":
        """Return the reply, or a coroutine of it.

        A plain query is answered at once, without a `Call`.
        """
        if type(message) is Invalid:
            return self._refused(frame, message, position, message.error)
        try:
            method = self._methods[message.method]
        except KeyError:
            return self._unknown(frame, message, position)
        id = message.id
        if not method.plain or id is UNSET or frame.in_full:
            return self._serve(frame, message, method, position)
        try:
            result = method.call(message.params)
            if type(result) is CoroutineType:
                # Without a wait, running it at once is 1.4 times faster than awaiting it, in a
                # batch of 50.
                try:
                    return self._finish(
                        frame, message, id, method, position, resume(result, result.send(None))
                    )
                except StopIteration as finished:
                    result = finished.value
            if type(result) in _SHORT:
                return Success(result, id)
            if hasattr(result, "__await__"):
                return self._finish(frame, message, id, method, position, result)
            return self._answer(frame, _sealed(result), id)
        except BaseException as error:
            return self._failure(frame, message, method, position, error)

    async def _finish(
        self,
        frame: Frame,
        message: Message,
        id: Id,
        method: Method,
        position: int | None,
        awaitable: Awaitable[object],
    ) -> Reply:
        """Return the reply to a plain query that waits."""
        try:
            answer = self._answer(frame, _sealed(await settled(await awaitable)), id)
            if isinstance(answer, (Success, Failure)):
                return answer
            return await answer
        except BaseException as error:
            return self._failure(frame, message, method, position, error)

    def _failure(
        self,
        frame: Frame,
        message: Message,
        method: Method,
        _position: int | None,
        error: BaseException,
    ) -> Reply:
        """Return the answer to a plain query that failed."""
        if isinstance(error, InvalidParams):
            # Params that are not an array or an object make the request invalid (JSON-RPC 2.0,
            # section 4.2), so that error takes precedence.
            try:
                frames.check_params_shape(message.params)
            except RpcError as shape:
                error = shape
        ids = Ids(message.id, message.params, frame.sender.headers)
        return failure(_owed_id(message), self._as_error(method.name, ids, error, frame.alone))

    def _unknown(self, frame: Frame, message: Message, position: int | None) -> Reply:
        """Return the answer to a call of an unknown method; it suggests a similar name."""
        try:
            frames.check_params_shape(message.params)
        except RpcError as shape:
            return self._refused(frame, message, position, shape)
        if message.id is UNSET:  # P6: a notification to an unknown method gets no answer
            self._refused(frame, message, position, MethodNotFound())
            return None
        name = message.method[:100]
        reason = f"there is no method {name!r}"
        # A search takes some milliseconds, so an array of unknown names does not get one for each.
        is_early = position is None or position < SUGGESTED
        near: str | None = None
        if is_early:
            identity = frame.sender.identity
            known = self._methods.values()
            near = suggested(name, (each.name for each in known if self._shows(each, identity)))
        if near is None:
            return self._refused(frame, message, position, MethodNotFound(reason))
        error = MethodNotFound(f"{reason}; did you mean {near!r}?", did_you_mean=near)
        return self._refused(frame, message, position, error)

    async def _serve(
        self,
        frame: Frame,
        message: Message,
        method: Method,
        position: int | None,
        filled: Filled | None = None,
    ) -> Reply:
        """Take one entry through all the steps.

        `filled` has the params of an entry with references, which is admitted as sent.
        """
        try:
            call = self._policy.admit(message, method, frame, position)
        except RpcError as error:
            return self._refused(frame, message, position, error)
        if filled is not None:
            call.params = filled.params
            call.digest = filled.digest
            call.has_references = True
        try:
            result = await self.run(call)
        except RpcError as error:
            if call.id is UNSET:
                return None
            return failure(call.id, error)
        if call.id is UNSET:
            return None
        answer = self._answer(frame, result, call.id)
        if isinstance(answer, (Success, Failure)):
            return answer
        return await answer

    def _refused(
        self, frame: Frame, message: Message | Invalid, position: int | None, error: RpcError
    ) -> Reply:
        """Return the answer to a message that was not admitted."""
        if frame.logged:
            name = message.method
            if name is None:
                name = frame.refused
            params: Raw | UnsetType = UNSET
            if type(message) is not Invalid:
                params = message.params
            method = self._methods.get(name)
            kind: str | None = None
            if method is not None:
                kind = method.kind.value
            ids = Ids(message.id, params, frame.sender.headers)
            log_refusal(ids, name, error, kind=kind, position=position, caller=frame.sender.caller)
        return failure(_owed_id(message), error)

    def _refused_entries(self, read: Message | Invalid, refusal: Failure) -> list[Answer]:
        """Return one answer for each entry of a batch that is refused as a whole.

        There are none for any other message.
        """
        if type(read) is not Invalid or not 0 < len(read.entries) <= MOST_REFUSED:
            return []
        ids = frames.ids_of(read.entries, self._strict)
        # Clients that match answers by id show only the message of an error.
        first = refusal.error
        error = structs.replace(first, message=f"{first.message}: {first.data['reason']}")
        return [Failure(error, id) for id in ids]

    # --- steps 3 to 6, for JSON-RPC and MCP -------------------------------------------------------

    async def run(self, call: Call) -> object:
        """Return the result of an admitted call, as `Raw` or a constant.

        Raises the `RpcError` that answers a call that failed.
        """
        error: BaseException | None = None
        before = None
        if self._shows_ids or logger.handlers:
            before = CURRENT.set(call.ids)
        try:
            if self._lifespan is not None:
                if not self._lifespan.is_entered:  # a client remains after `App.aclose`
                    await self._lifespan.enter()
                call.state = self._lifespan.state
            guarded = self._guarded
            if call.method.home is not None:
                guarded = self._guard_of(call.method.home)
            if guarded is None:
                return await self._invoke(call, None)
            result = await guarded(Context(call))
            if result is not call.result:  # the middleware has replaced it
                if call.shape is not None:
                    result = call.shape(result)
                result = Raw(frames.encode(result))
            return result
        except InputRequired as pause:
            error = pause
            raise
        except BaseException as raised:
            error = raised
            if isinstance(raised, RpcError):
                error = with_true_ran(call, raised)
                if error is not raised:
                    raise error from raised
            raise self._as_error(call.method.name, call.ids, raised, call.frame.alone) from None
        finally:
            # A command reports its own end, perhaps after its caller left.
            if call.run is None and call.frame.reported:
                self._events.call_ended(call, error)
            if call.replayed and call.frame.replayed is not None:
                call.frame.replayed.append(_owed_id(call))
            if before is not None:
                # The call may have begun in another context, or be closed from there.
                with suppress(ValueError):
                    CURRENT.reset(before)

    def _guard(self, inner: Next) -> Next:
        """Return the middleware of the app around the rest of the steps."""
        for layer in reversed(self._middleware):  # the first one is the outermost
            inner = self._around(layer, inner)
        return inner

    def _guard_of(self, home: Home) -> Next:
        """Return the middleware around the methods of a mounted app."""
        if home not in self._guards:
            self._guards[home] = self._guard(home.guard(self._invoke_in, self._around))
        return self._guards[home]

    def _invoke_in(self, context: Context) -> Awaitable[object]:
        return self._invoke(call_of(context), context)

    # complexity: steps 4 to 6 in order; a further function would slow each call.
    async def _invoke(self, call: Call, context: Context | None) -> object:
        """Take steps 4 to 6, inside the middleware.

        The middleware sees the result as the bytes that will be sent.
        """
        call.reached = True
        method = call.method
        frame = call.frame
        is_recorded = call.key is not None or call.keyless
        result: Any
        if method.plain and method.provided is None and self._blocking is None:
            try:
                result = method.call(call.params)
            except InvalidParams as misfit:
                _understand(call, misfit)
                result = method.call(call.params)
        else:
            try:
                handler = self._handler(call, context)
            except InvalidParams as misfit:
                _understand(call, misfit)
                handler = self._handler(call, context)
            if is_recorded or (method.is_command and self._events.has_observers):
                call.fingerprint = call.digest or fingerprint(call.params, method.key_place)
                if self._events.gate is not None:
                    await self._events.call_begins(call)
            if is_recorded:
                result = self.commands.execute(call, handler)
            else:
                result = handler()
        if hasattr(result, "__await__"):
            if not is_recorded:
                result = settled(result)
            if method.timeout is None or frame.alone:
                result = await result
            else:
                result = await _within(method.timeout, call, result)
        if call.key is None:  # else the command has shaped and encoded its result, for the ledger
            if call.shape is not None:
                result = call.shape(result)
            if frame.in_full or context is not None or type(result) not in _CONSTANT:
                result = Raw(frames.encode(result))
        call.result = result
        return result

    def _handler(self, call: Call, context: Context | None) -> Handler:
        """Return the function of a call with its arguments.

        A command's params are decoded twice: here into the types of the function, by the decoder
        that is made for them, and once without types, at admission, for the key and the
        fingerprint, which depend on the JSON alone.
        """
        method = call.method
        threaded = method.blocking and not call.frame.alone
        handler: Handler
        if method.signature.simple:
            handler = partial(method.function, *method.signature.bind(call.params))
        else:
            context = context or Context(call)
            args, keywords = method.signature.bind_all(call.params, context)
            handler = partial(method.function, *args, **keywords)
            if method.provided is not None:
                handler = partial(
                    method.provided.call, context, args, keywords, call, in_a_thread=threaded
                )
        if threaded and method.provided is None:
            handler = partial(in_thread, handler)
        if self._blocking is not None and not threaded:
            handler = partial(self._watched, method, handler)
        return handler

    def _watched(self, method: Method, handler: Handler) -> object:
        """Call a function, and warn once if it blocks the event loop for long."""
        note = partial(self._note_blocking, method)
        began = time.perf_counter()
        try:
            result = handler()
        finally:
            note(time.perf_counter() - began)
        if isinstance(result, CoroutineType):
            return timed(result, note)
        return result

    def _note_blocking(self, method: Method, seconds: float) -> None:
        """Warn if one step of a function took too long."""
        if seconds <= BLOCKS or self._blocking is None or method in self._blocking:
            return
        self._blocking.add(method)
        fix = (
            "if it waits for a disk, a lock or a network, declare it with blocking=True, "
            "and it runs in a thread"
        )
        if method.is_async:
            fix = (
                "await calls that do not block, or make it a plain function with blocking=True, "
                "which runs in a thread"
            )
        logger.warning(
            "%s has blocked the event loop for %d ms, and all other calls waited; %s (%s)",
            method.name,
            seconds * 1000,
            fix,
            place_of(method.function),
        )

    def _as_error(self, name: str, ids: Ids, error: BaseException, alone: bool = False) -> RpcError:
        """Return the answer to a call that failed.

        An exception that ends more than the call is raised again.
        """
        if isinstance(error, RpcError):
            return error
        if alone and needs_loop(error):
            raise CannotWait from error
        if isinstance(error, (KeyboardInterrupt, CannotWait, OtherLoop)) or is_closing(error):
            raise error
        # A handler may let the cancellation of another task escape; that is a failure of the
        # handler.
        if isinstance(error, asyncio.CancelledError) and cancels() > 0:
            raise error
        failed(name, ids.correlation_id, error, ids=ids.facts())
        if isinstance(error, (Mistake, ResultMisfit)):
            return InternalError(str(error))
        return InternalError()

    # --- the entry for MCP ------------------------------------------------------------------------

    async def call(self, call: Call, *, has_place: bool = False) -> Raw:
        """Run a call that was parsed and admitted elsewhere.

        An entry of a batch tool has its place in flight already (`places`).
        """
        frame = call.frame
        caller = frame.sender.caller
        frame.logged = logger.isEnabledFor(INFO)
        frame.reported = frame.logged or self._events.observed
        frame.single_user = self._single_user
        count = 0 if has_place else 1
        if count:
            self._check_load(caller, count)
        self._count(count, caller)
        try:
            result = await self.run(call)
            assert isinstance(result, Raw)
            return result
        finally:
            self._count(-count, caller)

    @contextmanager
    def places(self, caller: str, count: int) -> Iterator[None]:
        """Replace the place of a call in flight by those of its entries.

        Raises `Busy` if they do not fit. As an array does, they fit if nothing else is in flight.
        """
        with self.set_aside(caller):
            self._check_load(caller, count)
            self._count(count, caller)
            try:
                yield
            finally:
                self._count(-count, caller)

    @contextmanager
    def set_aside(self, caller: str) -> Iterator[None]:
        """Do not count a call as in flight while it waits for its caller.

        It needs no place to continue.
        """
        self._count(-1, caller)
        try:
            yield
        finally:
            self._count(1, caller)

    def plain(
        self, method: Method, params: Raw, shape: Shape, id: Id, *, has_place: bool = False
    ) -> "bytes | Coroutine[Any, Any, bytes] | None":
        """Take the short path: return the result as bytes at once, or a coroutine of it.

        None: the path is closed. It is for a plain query without middleware, log or a count of
        callers. A coroutine is not begun here: its caller may await it in another task. An entry of
        a batch has its place in flight already.
        """
        if not method.plain or self._in_full or self._held is not None or logger.isEnabledFor(INFO):
            return None
        try:
            if not has_place and (self._in_flight or self.commands.left):
                self._check_load(ANONYMOUS, 1)
            try:
                result = method.call(params)
            except InvalidParams as misfit:
                result = method.call(method.understood(params, misfit))
            if hasattr(result, "__await__"):
                return self._finish_plain(method, result, shape, id)
            return frames.encode(shape(result))
        except BaseException as error:
            raise self._as_error(method.name, Ids(id), error) from None

    async def _finish_plain(self, method: Method, result: object, shape: Shape, id: Id) -> bytes:
        """Return the result of a plain query that waits."""
        self._count(1, ANONYMOUS)  # where callers are counted, the short path is closed
        try:
            return frames.encode(shape(await settled(result)))
        except BaseException as error:
            raise self._as_error(method.name, Ids(id), error) from None
        finally:
            self._count(-1, ANONYMOUS)

    # --- the reply --------------------------------------------------------------------------------

    # A reply has at most `bytes_out` bytes. `_answer` applies this when an entry of a batch ends, so
    # that no batch stores more than a reply may hold. `_seal` applies it when the reply is written.

    def _answer(self, frame: Frame, result: object, id: Id) -> "Answer | Pending":
        """Return the answer with a result, or an error if the reply has no room for it."""
        if frame.room is not None and isinstance(result, (str, Raw)):
            size = _size(result)
            if size > frame.room:
                refusal = failure(id, self._too_long())
                if frame.alone:
                    return refusal
                return _after_a_turn(refusal)
            if size >= COUNTED:
                frame.room -= size
        return Success(result, id)

    def _seal_if_owed(self, reply: Reply) -> bytes | None:
        """Encode the reply to a single message, if it gets one."""
        if reply is None:
            return None
        return self._seal(reply)

    def _seal_refusal(self, read: Message | Invalid, refusal: Failure) -> bytes:
        """Encode the error that answers a single message, or one for each entry of a batch."""
        if self._refuses_each:
            entries = self._refused_entries(read, refusal)
            if entries:
                return self._seal(entries)
        return self._seal(refusal)

    def _seal(self, answers: Answer | list[Answer]) -> bytes:
        """Encode a reply. A result that cannot be sent fails only its own entry."""
        try:
            data = frames.write(answers)
            if type(answers) is not Success and data.find(b"null") >= 0:
                _check_errors(answers)
        except Exception as reason:  # the data of an error, or a string with a lone surrogate
            if isinstance(answers, list):
                return self._seal_each(answers)
            ids = Ids(answers.id)
            failed("a reply", ids.correlation_id, reason, ids=ids.facts())
            return frames.encode(failure(answers.id, InternalError()))
        if len(data) <= self._policy.limits.bytes_out:
            return data
        if isinstance(answers, list):
            return self._seal_each(answers)
        return frames.encode(failure(answers.id, self._too_long(answers)))

    def _seal_record(self, answer: Answer) -> bytes:
        """Encode one answer of a stream. One that cannot be sent becomes an error."""
        try:
            data = frames.write(answer)
            if type(answer) is Failure and data.find(b"null") >= 0:
                _check_errors(answer)
        except Exception as reason:  # the data of an error, or a string with a lone surrogate
            ids = Ids(answer.id)
            failed("a reply", ids.correlation_id, reason, ids=ids.facts())
            return frames.encode(failure(answer.id, InternalError()))
        return data

    def _seal_each(self, answers: list[Answer]) -> bytes:
        """Encode the answers of a batch one by one: some of them cannot be sent."""
        sealed = []
        room = self._policy.limits.bytes_out
        for answer in answers:
            data = self._seal(answer)
            if len(data) > room:
                data = frames.encode(failure(answer.id, self._too_long(answer)))
            room -= len(data)
            sealed.append(data)
        return make_batch(sealed)

    def _too_long(self, answer: Answer | None = None) -> InternalError:
        """Return the error that replaces an answer that is too long.

        It keeps the `ran` of that answer.
        """
        limit = self._policy.limits.bytes_out
        ran = "yes"
        if isinstance(answer, Failure):
            error = answer.error
            ran = RpcError(error.code, "", error.data).ran
        reason = f"the reply is longer than {limit} bytes"
        return InternalError(reason, type="limit_exceeded", limit="bytes_out", max=limit, ran=ran)


def _around(layer: Middleware, inner: Next) -> Next:
    return lambda context: layer(context, inner)


def _checked_around(layer: Middleware, inner: Next) -> Next:
    """Return the same, but detect a layer that drops the result it was given."""

    async def guarded(context: Context) -> Any:
        given: object = None

        async def following(context: Context) -> Any:
            nonlocal given
            given = await inner(context)
            return given

        answer: Any = layer(context, following)
        if not hasattr(answer, "__await__"):
            kind = type(answer).__name__
            raise Mistake(
                f"The middleware {_title(layer)} returned {kind}, not an awaitable.",
                fix="make it a coroutine function: "
                "async def layer(context, call_next): return await call_next(context)",
            )
        result = await answer
        if result is None and given is not None and given != _NULL:
            raise Mistake(
                f"The middleware {_title(layer)} returned None, "
                f"and dropped the result of {context.method}.",
                "its caller would get null",
                "return what the next layer returned: return await call_next(context)",
            )
        return result

    return guarded


def _title(layer: Middleware) -> str:
    called = getattr(layer, "__qualname__", type(layer).__qualname__)
    if hasattr(layer, "__code__"):
        return f"{called} ({place_of(layer)})"
    return str(called)


def _understand(call: Call, misfit: InvalidParams) -> None:
    """Give a tool call the meaning of arguments that do not fit; raise the misfit if it has none.

    Its identity is that of the meaning.
    """
    if call.peer is None:
        raise misfit
    call.params = call.method.understood(call.params, misfit)
    call.digest = None


async def _within(seconds: float, call: Call, work: Awaitable[object]) -> object:
    """Return the result of a call, or raise `DeadlineExceeded` if it takes longer."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await work
    except TimeoutError:
        if not deadline.expired():
            raise
        raise DeadlineExceeded(
            f"{call.method.name} took longer than its timeout of {seconds:g} s",
            ran=ran_if_interrupted(call),
        ) from None


def _owed_id(message: Message | Invalid | Call) -> Id:
    """Return the id under which a message is answered: null if it has none."""
    if message.id is UNSET:
        return None
    return message.id


def _refused_reply(
    entries: list[Message | Invalid], is_batch: bool, refusal: RpcError
) -> bytes | None:
    """Return the reply that refuses all entries of a message."""
    answers = []
    for entry in entries:
        if entry.id is UNSET:
            continue
        error = refusal
        if isinstance(entry, Invalid):
            error = entry.error
        answers.append(frames.encode(failure(entry.id, error)))
    return make_reply(answers, is_batch)


def _check_errors(answers: Answer | list[Answer]) -> None:
    """Raise if the data of an error has a NaN: it is the user's own, and msgspec writes null."""
    if not isinstance(answers, list):
        answers = [answers]
    for answer in answers:
        if type(answer) is Failure:
            frames.encode(answer)


def _size(result: str | Raw) -> int:
    if isinstance(result, str):
        return len(result)
    return memoryview(result).nbytes


def _sealed(result: object) -> object:
    """Return an immutable result.

    It is encoded when its entry ends, not when the reply is written.
    """
    is_ready = type(result) in _CONSTANT or (type(result) is float and math.isfinite(result))
    if is_ready:
        return result
    return Raw(frames.encode(result))


async def _after_a_turn(refusal: Answer) -> Answer:
    """Let other calls run after a result that was too long: making and encoding it took a while."""
    await asyncio.sleep(0)
    return refusal
