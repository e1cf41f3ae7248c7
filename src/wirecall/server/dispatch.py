"""The seven steps from bytes to bytes.

    1 parse    protocol.messages.read  bytes -> one message or a batch
    2 admit    Policy.admit            message -> Call, or the error that answers it
    3 guard    middleware              once per entry, alike for single calls, batch entries and notifications
    4 bind     the method's signature  raw params -> arguments
    5 claim    commands.execute        commands with a key: run, wait, replay or refuse
    6 invoke   the function            its result is encoded once; the same bytes are recorded and sent
    7 reply    Dispatcher._seal        answers -> bytes or nothing, in input order

`Dispatcher.handle` is the whole line for JSON-RPC. `Dispatcher.run` is steps 3 to 6 for JSON-RPC and MCP alike. A plain
query that no middleware and no log sees takes a short path: `_begin` for JSON-RPC, `call_plain` for MCP.

No step calls an earlier one. An `RpcError` at any step becomes the answer of its entry. Any other exception is logged with
the call's correlation id and becomes -32603, without details on the wire (J15).
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from logging import INFO
from types import CoroutineType, NoneType
from typing import Any, Protocol, TypeAlias

from msgspec import UNSET, Raw

from wirecall.errors import (
    Busy,
    CannotWait,
    DeadlineExceeded,
    InternalError,
    InvalidParams,
    MethodNotFound,
    OtherLoop,
    ResultMisfit,
    RpcError,
    UsageError,
)
from wirecall.ledger.base import RecordId
from wirecall.logs import failed, logger
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import (
    Answer,
    Data,
    Failure,
    Id,
    Invalid,
    Message,
    Sending,
    Success,
    failure,
    make_batch,
    make_reply,
)
from wirecall.protocol.params import place_of
from wirecall.server.batch import run_batch
from wirecall.server.call import (
    ANONYMOUS,
    Call,
    CallEnded,
    Context,
    CorrelationId,
    Events,
    Frame,
    Handler,
    HttpHeader,
    InputRequired,
    Middleware,
    Next,
    Shape,
    call_of,
    correlation_of,
    log,
)
from wirecall.server.identity import Identity, Permit
from wirecall.server.lifespan import Lifespan
from wirecall.server.method import Execution, Method, Registry
from wirecall.server.policy import Policy, fingerprint
from wirecall.stepping import cancels, in_thread, is_closing, needs_loop, resume, run_now, settled

Reply: TypeAlias = Answer | None  # None for a notification
Pending: TypeAlias = Coroutine[Any, Any, Reply]

# Results that cannot change between the end of their call and the writing of the reply, so that one encode serves all. A
# float is not among them, since JSON has neither NaN nor the infinities.
_CONSTANT = frozenset({int, str, bool, NoneType})
_SHORT = _CONSTANT - {str}

# A shorter result is not counted against `Limits.bytes_out` before the reply is written: 50 of them take little memory.
COUNTED = 1024

BUSY_RETRY_MS = 100

BLOCKS = 0.1  # seconds of a plain function on the event loop that `wirecall dev` tells of


class Executor(Protocol):
    """Runs commands that have a record; `commands.execute.Commands` is one."""

    left: int  # commands that go on although their callers have left

    def execute(self, call: Call, handler: Handler) -> Coroutine[Any, Any, Raw]: ...
    def hand_over(self, run: Any, id: str, document: bytes, ttl: float) -> Coroutine[Any, Any, bool]: ...
    def cancel(self, id: RecordId) -> None: ...
    def start(self, work: Coroutine[Any, Any, None]) -> None: ...

    async def aclose(self, grace: float) -> None: ...


class Dispatcher:
    """Serves the methods of a registry."""

    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        commands: Executor,
        events: Events,
        *,
        middleware: Sequence[Middleware] = (),
        execution: Execution | None = None,
        strict: bool = True,
        permit: Permit | None = None,
        lifespan: Lifespan | None = None,
        tells_blocking: bool = False,
    ) -> None:
        self._methods = registry.methods
        self._policy = policy
        self.commands = commands
        self._events = events
        self._in_full = bool(middleware) or execution == "sequential" or tells_blocking
        self._guarded: Next | None = None
        for layer in reversed(middleware):  # the first one is the outermost
            self._guarded = _around(layer, self._guarded or (lambda context: self._invoke(call_of(context), context)))
        self._execution = execution
        self._strict = strict
        self._permit = permit
        self._lifespan = lifespan
        self._told: set[Method] | None = set() if tells_blocking else None  # the methods that were told of
        self._in_flight = 0
        # Calls of each caller, where one caller has fewer places than all have together.
        is_shared = policy.limits.in_flight_per_caller < policy.limits.in_flight
        self._held: Counter[str] | None = Counter() if is_shared else None
        self._idle: asyncio.Event | None = None  # set when no call is in flight
        # The frame of a single call is only read, so anonymous calls without a log share two: with a loop, and without.
        self._user = "user" if policy.single_user else None  # all anonymous calls are this one's
        self._quiet = [Frame(ANONYMOUS, alone, self._in_full, events.observed, peer=self._user) for alone in (False, True)]

    def handle(
        self,
        data: Data,
        caller: str = ANONYMOUS,
        alone: bool = False,
        replayed: list[Id] | None = None,
        key: str | None = None,
        sending: Sending | None = None,
        peer: str | None = None,
        identity: Identity | None = None,
        headers: HttpHeader | None = None,
    ) -> "bytes | Coroutine[Any, Any, bytes | None] | None":
        """Return the reply to a message: at once where nothing waits, else as a coroutine, which costs a quarter of a call.

        `alone` says that there is no event loop, so that nothing may wait. `key` is that of a single call. `sending` is the
        way of the reply, where a transport watches it. `peer` names an anonymous sender that is the only one of its kind.
        `identity` is the sender's, where a token named it, and `headers` are those of the HTTP request.
        """
        limits = self._policy.limits
        # `Any`, since a type checker does not follow `type(read) is list`, and `isinstance` costs every call some per cent.
        read: Any = frames.read(data, limits, self._strict)
        is_batch = type(read) is list
        if key is not None and is_batch:
            raise UsageError(
                "handle(array, key=...): a key beside a message belongs to a single call.",
                "with one key for all, every entry would be a repetition of the first, or refused",
                "give each entry its own: params.idempotency_key",
            )
        if identity is not None and self._permit is not None:
            # All entries ask for their scopes at once, before one of them runs: a client that gets more scope sends the
            # whole message again. A replay asks as well, since this precedes the claim.
            asked: dict[str, None] = {}
            for entry in read if is_batch else (read,):
                known = None if type(entry) is Invalid else self._methods.get(entry.method)
                if known is not None and known.scopes is not None:
                    asked.update(dict.fromkeys(known.scopes.of(entry.params)))
            self._permit(identity, asked)
        busy = self._in_flight + self.commands.left
        if busy:
            more = len(read) if is_batch else 1
            if busy + more > limits.in_flight or (self._held is not None and self._is_greedy(caller, more)):
                refusal = Busy(ran="no", retry_after_ms=BUSY_RETRY_MS)
                answers = [
                    frames.encode(failure(entry.id, entry.error if isinstance(entry, Invalid) else refusal))
                    for entry in (read if is_batch else [read])
                    if entry.id is not UNSET
                ]
                return make_reply(answers, is_batch)
        logged = logger.isEnabledFor(INFO)
        is_bare = sending is None and replayed is None and caller == ANONYMOUS and key is None
        if not (is_bare or is_batch or self._in_full or type(read) is Invalid or read.id is UNSET):
            method = self._methods.get(read.method)
            is_bare = method is not None and method.plain  # a plain query on its own reads nothing of its frame
        if is_batch or logged or not is_bare:
            in_full, reported = logged or self._in_full, logged or self._events.observed
            room, peer = limits.bytes_out if is_batch else None, self._user or peer
            frame = Frame(caller, alone, in_full, reported, logged, key, replayed, room, peer, sending, identity, headers)
        else:
            frame = self._quiet[alone]
        if is_batch:
            later = self._reply_all(frame, read)
            return run_now(later) if alone else later
        reply = self._begin(frame, read, None)
        if type(reply) is Success or type(reply) is Failure:
            return self._seal(reply)
        if reply is None:
            return None
        try:
            later = self._reply_later(caller, resume(reply, reply.send(None)))
        except StopIteration as finished:  # it did not wait
            return None if finished.value is None else self._seal(finished.value)
        return run_now(later) if alone else later

    async def _reply_later(self, caller: str, begun: Awaitable[Reply]) -> bytes | None:
        """Return the reply to a single call that waits."""
        self._count(1, caller)
        try:
            reply = await begun
            return None if reply is None else self._seal(reply)
        finally:
            self._count(-1, caller)

    async def _reply_all(self, frame: Frame, messages: list[Message | Invalid]) -> bytes | None:
        """Return the reply to a batch."""

        def in_lane(message: Message | Invalid) -> bool:
            assert not isinstance(message, Invalid)  # those are answered on the spot
            method = self._methods.get(message.method)
            if method is None:  # it was removed a moment ago
                return False
            execution = method.execution or self._execution
            return method.is_command if execution is None else execution == "sequential"

        unwatched: Sending | None = None
        self._count(len(messages), frame.caller)
        try:
            concurrency = 1 if frame.alone else self._policy.limits.concurrency
            if frame.sending is None:  # no transport watches it: its answers have arrived when this coroutine returns
                frame.sending = unwatched = Sending()
            replies = await run_batch(frame, messages, self._begin, in_lane, concurrency=concurrency)
            # A batch of notifications gets no answer at all, not even an empty array (JSON-RPC 2.0, section 6; J7).
            owed: list[Answer] = list(filter(None, replies))
            sealed = self._seal(owed) if owed else None
            if unwatched is not None:
                unwatched.written()
            return sealed
        finally:
            self._count(-len(messages), frame.caller)
            if unwatched is not None:
                unwatched.lost()

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

    def _is_greedy(self, caller: str, count: int) -> bool:
        """Return whether a caller takes more places than one may. Anonymous calls are not counted: they have no name."""
        held = 0 if self._held is None else self._held[caller]
        return held > 0 and held + count > self._policy.limits.in_flight_per_caller

    def _count(self, number: int, caller: str) -> None:
        """Count calls that begin, or that end if `number` is negative."""
        self._in_flight += number
        if self._held is not None and caller != ANONYMOUS:
            self._held[caller] += number
            if self._held[caller] == 0:
                del self._held[caller]
        if self._idle is not None and not self._in_flight:
            self._idle.set()

    # --- one entry of JSON-RPC ---------------------------------------------------------------------------------------

    def _begin(self, frame: Frame, message: Message | Invalid, position: int | None) -> "Reply | Pending":
        """Return the reply, or a coroutine of it. A plain query is answered on the spot, without a call and its context."""
        if type(message) is Invalid:
            return self._refused(frame, message, position, message.error)
        try:
            method = self._methods[message.method]
        except KeyError:
            error: RpcError = MethodNotFound(f"there is no method {message.method[:100]!r}")
            try:
                frames.check_params_shape(message.params)
            except RpcError as shape:
                return self._refused(frame, message, position, shape)
            refused = self._refused(frame, message, position, error)
            return None if message.id is UNSET else refused  # P6: a notification to an unknown method gets no answer
        id = message.id
        if not method.plain or id is UNSET or frame.in_full:
            return self._serve(frame, message, method, position)
        try:
            result = method.call(message.params)
            if type(result) is CoroutineType:
                # A coroutine that does not wait is run on the spot: 1.4 times faster than awaiting it, in a batch of 50.
                try:
                    return self._finish(frame, message, id, method, resume(result, result.send(None)))
                except StopIteration as finished:
                    result = finished.value
            if type(result) in _SHORT:
                return Success(result, id)
            if hasattr(result, "__await__"):
                return self._finish(frame, message, id, method, result)
            return self._answer(frame, _sealed(result), id)
        except BaseException as error:
            return self._failure(frame, message, method, error)

    async def _finish(self, frame: Frame, message: Message, id: Id, method: Method, awaitable: Awaitable[object]) -> Reply:
        try:
            answer = self._answer(frame, _sealed(await settled(await awaitable)), id)
            return answer if isinstance(answer, (Success, Failure)) else await answer
        except BaseException as error:
            return self._failure(frame, message, method, error)

    def _failure(self, frame: Frame, message: Message, method: Method, error: BaseException) -> Reply:
        """Return the answer to a plain query that failed."""
        if isinstance(error, InvalidParams):
            # Params that are neither array nor object make the request invalid (JSON-RPC 2.0, section 4.2), so that error
            # takes precedence.
            try:
                frames.check_params_shape(message.params)
            except RpcError as shape:
                error = shape
        id = None if message.id is UNSET else message.id
        return failure(id, self._as_error(method.name, correlation_of(message.id), error, frame.alone))

    async def _serve(self, frame: Frame, message: Message, method: Method, position: int | None) -> Reply:
        """Take one entry through all the steps."""
        try:
            call = self._policy.admit(message, method, frame, position)
        except RpcError as error:
            return self._refused(frame, message, position, error)
        try:
            result = await self.run(call)
        except RpcError as error:
            return None if call.id is UNSET else failure(call.id, error)
        if call.id is UNSET:
            return None
        answer = self._answer(frame, result, call.id)
        return answer if isinstance(answer, (Success, Failure)) else await answer

    def _refused(self, frame: Frame, message: Message | Invalid, position: int | None, error: RpcError) -> Reply:
        """Return the answer to a message that was not admitted."""
        if frame.logged:
            name = "" if type(message) is Invalid else message.method
            method = self._methods.get(name)
            log(
                CallEnded(
                    correlation_id=correlation_of(message.id),
                    method=name[:100],
                    kind=method.kind.value if method else None,
                    position=position,
                    outcome="error",
                    code=error.code,
                )
            )
        return failure(None if message.id is UNSET else message.id, error)

    # --- steps 3 to 6, for JSON-RPC and MCP --------------------------------------------------------------------------

    async def run(self, call: Call) -> object:
        """Return the result of an admitted call, as `Raw` or a constant; or raise the `RpcError` that answers it."""
        error: BaseException | None = None
        try:
            if self._lifespan is not None:
                if not self._lifespan.is_entered:  # a client is still there after `App.aclose`
                    await self._lifespan.enter()
                call.state = self._lifespan.state
            if self._guarded is None:
                return await self._invoke(call, None)
            result = await self._guarded(Context(call))
            if result is not call.result:  # the middleware has replaced it
                result = Raw(frames.encode(call.shape(result) if call.shape else result))
            return result
        except InputRequired as pause:
            error = pause
            raise
        except BaseException as raised:
            error = raised
            ran = "no" if call.run is None else call.run.ran
            if isinstance(raised, RpcError) and not call.reached and raised.ran != ran:
                # Middleware or a provider refused the call, so it has not run, whatever the code of the error says. A run
                # before it may have acted.
                error = raised.telling(ran)
                raise error from raised
            is_unrecorded = call.method.is_command and call.run is None
            if isinstance(raised, RpcError) and raised.is_remote and raised.ran == "no" and call.reached and is_unrecorded:
                # Another server, or a client that was asked, reports `ran` of its own part. That of this command is unknown.
                error = raised.telling("unknown")
                raise error from raised
            raise self._as_error(call.method.name, call.correlation_id, raised, call.frame.alone) from None
        finally:
            if call.run is None and call.frame.reported:  # a command reports its own end, perhaps after its caller left
                self._events.call_ended(call, error)
            if call.replayed and call.frame.replayed is not None:
                call.frame.replayed.append(None if call.id is UNSET else call.id)

    async def _invoke(self, call: Call, context: Context | None) -> object:
        """Take steps 4 to 6, inside the middleware, which sees the result as the bytes that will be sent."""
        call.reached = True
        method, frame = call.method, call.frame
        is_recorded = call.key is not None or call.keyless
        result: Any
        if method.plain and method.provided is None and self._told is None:
            result = method.call(call.params)
        else:
            # A command's params are decoded twice: here into the types of the function, by the decoder that is made for
            # them, and once without types, at admission, for the key and the fingerprint, which depend on the JSON alone.
            threaded = method.blocking and not frame.alone
            handler: Handler
            if method.signature.simple:
                handler = partial(method.function, *method.signature.bind(call.params))
            else:
                context = context or Context(call)
                args, keywords = method.signature.bind_all(call.params, context)
                handler = partial(method.function, *args, **keywords)
                if method.provided is not None:
                    handler = partial(method.provided.call, context, args, keywords, call, in_a_thread=threaded)
            if threaded and method.provided is None:
                handler = partial(in_thread, handler)
            if self._told is not None and not threaded and not method.is_async:
                handler = partial(self._watched, method, handler)
            if is_recorded or (method.is_command and self._events.observed):
                call.fingerprint = call.identity or fingerprint(call.params)
            result = self.commands.execute(call, handler) if is_recorded else handler()
        if is_recorded or hasattr(result, "__await__"):
            work = result if is_recorded else settled(result)
            if method.timeout is None or frame.alone:
                result = await work
            else:
                deadline = asyncio.timeout(method.timeout)
                try:
                    async with deadline:
                        result = await work
                except TimeoutError:
                    if not deadline.expired():
                        raise
                    # A command without a record was cut somewhere in the middle; a query changes nothing wherever it is cut.
                    ran = call.run.ran if call.run else "unknown" if method.is_command else "no"
                    raise DeadlineExceeded(
                        f"{method.name} took longer than its timeout of {method.timeout:g} s", ran=ran
                    ) from None
        if call.key is None:  # else the command has shaped and encoded its result, for the ledger
            result = call.shape(result) if call.shape else result
            result = result if type(result) in _CONSTANT and not frame.in_full else Raw(frames.encode(result))
        call.result = result
        return result

    def _watched(self, method: Method, handler: Handler) -> object:
        """Call a plain function, and tell once if it keeps the event loop from everything else for long."""
        began = time.perf_counter()
        try:
            return handler()
        finally:
            seconds = time.perf_counter() - began
            if seconds > BLOCKS and self._told is not None and method not in self._told:
                self._told.add(method)
                logger.warning(
                    "%s has blocked the event loop for %d ms, and all other calls waited; if it waits for a disk, a lock "
                    "or a network, declare it with blocking=True, and it runs in a thread (%s)",
                    method.name,
                    seconds * 1000,
                    place_of(method.function),
                )

    def _as_error(self, name: str, id: CorrelationId, error: BaseException, alone: bool = False) -> RpcError:
        """Return the answer to a call that failed. An exception that ends more than the call is raised again."""
        if isinstance(error, RpcError):
            return error
        if alone and needs_loop(error):
            raise CannotWait from error
        if isinstance(error, (KeyboardInterrupt, CannotWait, OtherLoop)) or is_closing(error):
            raise error
        # A handler may let the cancellation of another task escape; that is a failure of the handler.
        if isinstance(error, asyncio.CancelledError) and cancels() > 0:
            raise error
        failed(name, id, error)
        return InternalError(str(error)) if isinstance(error, ResultMisfit) else InternalError()

    # --- MCP's way in ------------------------------------------------------------------------------------------------

    async def call(self, call: Call) -> Raw:
        """Run a call that was parsed and admitted elsewhere."""
        frame, caller = call.frame, call.frame.caller
        frame.logged = logger.isEnabledFor(INFO)
        frame.reported, frame.peer = frame.logged or self._events.observed, self._user or frame.peer
        is_full = self._in_flight + self.commands.left >= self._policy.limits.in_flight
        if is_full or (self._held is not None and self._is_greedy(caller, 1)):
            raise Busy(ran="no", retry_after_ms=BUSY_RETRY_MS)
        self._count(1, caller)
        try:
            result = await self.run(call)
            assert isinstance(result, Raw)
            return result
        finally:
            self._count(-1, caller)

    @contextmanager
    def set_aside(self, caller: str) -> Iterator[None]:
        """Leave a running call out of those in flight while it waits for its caller. It goes on even if no place is free."""
        self._count(-1, caller)
        try:
            yield
        finally:
            self._count(1, caller)

    def call_plain(
        self, method: Method, params: Raw, shape: Shape, id: CorrelationId
    ) -> "bytes | Coroutine[Any, Any, bytes] | None":
        """Take the short path: return the result as bytes at once, or a coroutine of it.

        None: the path is closed. It is for a plain query that neither middleware, log nor a count sees.
        """
        if not method.plain or self._in_full or self._held is not None or logger.isEnabledFor(INFO):
            return None
        try:
            if self._in_flight + self.commands.left >= self._policy.limits.in_flight:
                raise Busy(ran="no", retry_after_ms=BUSY_RETRY_MS)
            result = method.call(params)
            if hasattr(result, "__await__"):
                return self._finish_plain(method, result, shape, id)
            return frames.encode(shape(result))
        except BaseException as error:
            raise self._as_error(method.name, id, error) from None

    async def _finish_plain(self, method: Method, result: object, shape: Shape, id: CorrelationId) -> bytes:
        self._count(1, ANONYMOUS)  # where callers are counted, the short path is closed
        try:
            return frames.encode(shape(await settled(result)))
        except BaseException as error:
            raise self._as_error(method.name, id, error) from None
        finally:
            self._count(-1, ANONYMOUS)

    # --- the reply ---------------------------------------------------------------------------------------------------

    def _answer(self, frame: Frame, result: object, id: Id) -> "Answer | Pending":
        """Return the answer with a result; or an error, if the results of the batch are too long with this one."""
        # This is found out here and not when the reply is written, so that no batch keeps more than one reply may hold.
        if frame.room is not None and isinstance(result, (str, Raw)):
            size = len(result) if isinstance(result, str) else memoryview(result).nbytes
            if size > frame.room:
                refusal = failure(id, self._too_long())
                return refusal if frame.alone else _after_a_turn(refusal)
            frame.room -= size if size >= COUNTED else 0
        return Success(result, id)

    def _seal(self, answers: Answer | list[Answer]) -> bytes:
        """Encode a reply. A result that cannot be sent costs its own entry, and no other."""
        try:
            data = frames.write(answers)
            if type(answers) is not Success and data.find(b"null") >= 0:
                # The data of an error is the user's own, and msgspec writes null for a NaN in it.
                for answer in answers if isinstance(answers, list) else (answers,):
                    if type(answer) is Failure:
                        frames.encode(answer)
            if len(data) <= self._policy.limits.bytes_out:
                return data
            error: RpcError = self._too_long(answers)
        except Exception as reason:  # the data of an error, or a text with half a character
            if not isinstance(answers, list):
                failed("a reply", correlation_of(answers.id), reason)
            error = InternalError()
        if not isinstance(answers, list):
            return frames.encode(failure(answers.id, error))
        sealed, limit = [], self._policy.limits.bytes_out  # one by one
        for answer in answers:
            data = self._seal(answer)
            data = data if len(data) <= limit else frames.encode(failure(answer.id, self._too_long(answer)))
            limit -= len(data)
            sealed.append(data)
        return make_batch(sealed)

    def _too_long(self, answer: Answer | list[Answer] | None = None) -> InternalError:
        """Return the error in place of an answer that is too long. It tells of the call what the answer told: `ran`."""
        limit = self._policy.limits.bytes_out
        told = answer.error if isinstance(answer, Failure) else None
        ran = "yes" if told is None else RpcError(told.code, "", told.data).ran
        reason = f"the reply is longer than {limit} bytes"
        return InternalError(reason, type="limit_exceeded", limit="bytes_out", max=limit, ran=ran)


def _around(layer: Middleware, inner: Next) -> Next:
    return lambda context: layer(context, inner)


def _sealed(result: object) -> object:
    """Return a result that can no longer be changed: it is encoded when its entry ends, not when the reply is written."""
    is_ready = type(result) in _CONSTANT or (type(result) is float and math.isfinite(result))
    return result if is_ready else Raw(frames.encode(result))


async def _after_a_turn(refusal: Answer) -> Answer:
    """Let other calls run after a result that was too long: making and encoding it took a while."""
    await asyncio.sleep(0)
    return refusal
