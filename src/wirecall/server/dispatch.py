"""The seven steps from bytes to bytes.

    1 parse    frames.read             bytes -> one message or a batch
    2 admit    policy.admit            message -> Context, or the error that answers it
    3 guard    middleware              once per entry, alike for single calls, batch entries and notifications
    4 bind     methods' signature      raw params -> arguments
    5 claim    commands.execute        commands with a key: run, wait, replay or refuse
    6 invoke   Dispatcher._in_time     run the function; for commands with a key, handlers.handled
    7 reply    Dispatcher._seal        answers -> bytes or nothing, in input order

`Dispatcher.handle` is the whole line. `_begin` starts one entry: a plain query, which needs no context and waits for nobody,
is answered on the spot; everything else becomes a coroutine of `_serve`, which reads as the list above.

No step calls an earlier one. An `RpcError` at any step becomes the answer of its entry. Anything else is logged with the
call's correlation id and becomes -32603 with no detail on the wire (J15).
"""

import asyncio
import logging
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from msgspec import UNSET, Raw

from wirecall.commands.execute import Commands
from wirecall.commands.run import Call, Note, Noted, in_thread, is_closing, is_waiting, settled
from wirecall.errors import (
    Busy,
    CannotWait,
    DeadlineExceeded,
    EncodeError,
    InternalError,
    InvalidParams,
    MethodNotFound,
    RpcError,
    UsageError,
    rebuilt,
)
from wirecall.jsonrpc import make_batch, make_reply
from wirecall.logs import called, failed, logger
from wirecall.process import new_nonce
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Answer, Data, Failure, Id, Invalid, Message, Success, failure
from wirecall.server.batch import run_batch
from wirecall.server.context import Context, InputRequired, correlation_of
from wirecall.server.method import Method, Registry
from wirecall.server.policy import ANONYMOUS, Policy, fingerprint
from wirecall.server.terms import Execution
from wirecall.tasks import resume

Reply: TypeAlias = Answer | None  # None: nobody is owed one
Pending: TypeAlias = Coroutine[Any, Any, Reply]
Next: TypeAlias = Callable[[Context], Awaitable[Any]]
Middleware: TypeAlias = Callable[[Context, Next], Awaitable[Any]]

# Results that cannot change between the end of their call and the writing of the reply, so that one encode serves all.
_CONSTANT = frozenset({int, str, float, bool, types.NoneType})

# A shorter result is not counted against `Limits.bytes_out` before the reply is written: 50 of them are nothing to keep.
COUNTED = 1024

BUSY_RETRY_MS = 100


class Frame:
    """What the entries of one message share."""

    __slots__ = ("alone", "caller", "in_full", "key", "logged", "replayed", "room")

    def __init__(
        self,
        caller: str,
        alone: bool,
        replayed: list[Id] | None,
        logged: bool,
        in_full: bool,
        key: str | None = None,
        room: int | None = None,
    ) -> None:
        self.caller = caller
        self.alone = alone  # no event loop: nothing may wait
        self.replayed = replayed  # where the ids of replayed answers are collected, if anybody asked
        self.logged = logged
        self.key = key  # an idempotency key that came beside the message
        self.room = room  # bytes that the results of a batch may still take; None for a single call
        self.in_full = in_full  # somebody looks at every call, or holds it back: even a plain query takes all the steps


class Dispatcher:
    """Serves the methods of a registry."""

    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        commands: Commands,
        *,
        note: Note | None = None,
        middleware: Sequence[Middleware] = (),
        execution: Execution | None = None,
        strict: bool = True,
    ) -> None:
        self._methods = registry.methods
        self._policy = policy
        self._commands = commands
        self._note = note
        self._in_full = bool(middleware) or execution == "sequential"
        self._guarded = _guard(middleware, self._run)
        self._execution = execution
        self._strict = strict
        self._in_flight = 0
        # The frame of a single call is only read, so the calls that nobody watches share two: with a loop, and without.
        self._quiet = [Frame(ANONYMOUS, alone, None, False, self._in_full) for alone in (False, True)]

    def handle(
        self,
        data: Data,
        caller: str = ANONYMOUS,
        alone: bool = False,
        replayed: list[Id] | None = None,
        key: str | None = None,
    ) -> "bytes | Coroutine[Any, Any, bytes | None] | None":
        """Bytes in, bytes or nothing out: at once where nobody has to wait, else as a coroutine.

        `alone` says that there is no event loop, so that nothing may wait. `key` is that of a single call.
        """
        limits = self._policy.limits
        read: Any = frames.read(data, self._strict, limits.bytes_in, limits.depth, limits.batch)
        is_batch = type(read) is list
        if key is not None and is_batch:
            raise _key_for_many()
        busy = self._in_flight + self._commands.left
        if busy and busy + (len(read) if is_batch else 1) > limits.in_flight:
            return self._refuse(read if is_batch else [read], is_batch)
        logged = logger.isEnabledFor(logging.INFO)
        if is_batch:
            return self._batch(read, Frame(caller, alone, replayed, logged, logged or self._in_full, room=limits.bytes_out))
        if logged or replayed is not None or caller != ANONYMOUS or key is not None:
            frame = Frame(caller, alone, replayed, logged, logged or self._in_full, key)
        else:
            frame = self._quiet[alone]
        reply: Any = self._begin(frame, read, None)
        if type(reply) is types.CoroutineType:
            return self._single(reply)
        return None if reply is None else self._seal(reply)

    async def _single(self, pending: "Pending") -> bytes | None:
        self._in_flight += 1
        try:
            reply = await pending
            return None if reply is None else self._seal(reply)
        finally:
            self._in_flight -= 1

    async def call(self, context: Context) -> Raw:
        """Steps 3 to 6 for a call that was parsed and admitted elsewhere; an `RpcError` says why it has no result."""
        if self._in_flight + self._commands.left >= self._policy.limits.in_flight:
            raise Busy(ran="no", retry_after_ms=BUSY_RETRY_MS)
        logged = logger.isEnabledFor(logging.INFO)
        context._frame = Frame(context.caller, False, None, logged, True)
        started = time.perf_counter()
        word, code = "ok", None
        self._in_flight += 1
        try:
            result = await self._guarded(context)
            return result if result is context._result else self._shaped(context, result)
        except InputRequired:
            word = "input required"
            raise
        except BaseException as error:
            refused = self._as_error(context.method, context.correlation_id, error)
            word, code = "error", refused.code
            raise refused from None
        finally:
            self._in_flight -= 1
            if logged:
                self._log_call(context, word, code, started)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Leave a running call out of those in flight while it waits for its caller. It goes on even if no place is free."""
        self._in_flight -= 1
        try:
            yield
        finally:
            self._in_flight += 1

    def is_short(self, method: Method) -> bool:
        """Whether a method's way is short: a plain query that nobody watches needs its arguments and nothing else."""
        return method.plain and not self._in_full and not logger.isEnabledFor(logging.INFO)

    def call_plain(
        self, method: Method, params: Raw, shape: Callable[[Any], Any], id: Id
    ) -> "bytes | Coroutine[Any, Any, bytes]":
        """The short way: the result as bytes at once, or a coroutine for it."""
        try:
            if self._in_flight + self._commands.left >= self._policy.limits.in_flight:
                raise Busy(ran="no", retry_after_ms=BUSY_RETRY_MS)
            result = method.function(*method.bind(params))
            if hasattr(result, "__await__"):
                return self._finish_plain(method, result, shape, id)
            return frames.encode(shape(result))
        except BaseException as error:
            raise self._as_error(method.name, id, error) from None

    async def _finish_plain(self, method: Method, result: Any, shape: Callable[[Any], Any], id: Id) -> bytes:
        self._in_flight += 1
        try:
            return frames.encode(shape(await settled(result)))
        except BaseException as error:
            raise self._as_error(method.name, id, error) from None
        finally:
            self._in_flight -= 1

    def _as_error(self, name: str, correlation_id: Any, error: BaseException) -> RpcError:
        """What a failed call is answered with. What is not a call's failure goes on up."""
        if isinstance(error, RpcError):
            return error
        if isinstance(error, (KeyboardInterrupt, CannotWait)) or is_closing(error) or _is_cancelled(error):
            raise error
        failed(name, correlation_id, error)
        return InternalError()

    def _log_call(self, context: Context, word: str, code: int | None, started: float) -> None:
        called(
            correlation_id=context.correlation_id,
            method=context.record,
            kind=context.kind.value,
            position=context.position,
            duration_ms=(time.perf_counter() - started) * 1000,
            outcome="replayed" if context.replayed else word,
            code=code,
            caller=context.caller or None,
            idempotency_key=context.idempotency_key,
        )

    def _shaped(self, context: Context, result: Any) -> Raw:
        """What the caller gets for a value."""
        return Raw(frames.encode(context._shape(result) if context._shape else result))

    async def aclose(self, grace: float) -> None:
        """Finish or release the commands that are under way."""
        await self._commands.aclose(grace)

    async def _batch(self, entries: list[Message | Invalid], frame: Frame) -> bytes | None:
        concurrency = 1 if frame.alone else self._policy.limits.concurrency
        self._in_flight += len(entries)
        try:
            replies = await run_batch(entries, partial(self._begin, frame), self._is_in_lane, concurrency=concurrency)
            owed = [reply for reply in replies if reply is not None]
            return self._seal_batch(owed) if owed else None
        finally:
            self._in_flight -= len(entries)

    def _is_in_lane(self, message: Message | Invalid) -> bool:
        assert not isinstance(message, Invalid)  # those are answered on the spot
        method = self._methods[message.method]
        execution = method.execution or self._execution
        return method.is_command if execution is None else execution == "sequential"

    def _refuse(self, entries: list[Message | Invalid], is_batch: bool) -> bytes | None:
        """Too many calls are in flight: everybody who is owed an answer is told to come back."""
        busy = Busy(ran="no", retry_after_ms=BUSY_RETRY_MS)
        answers = [
            frames.encode(failure(entry.id, entry.error if isinstance(entry, Invalid) else busy))
            for entry in entries
            if entry.id is not UNSET
        ]
        return make_reply(answers, is_batch)

    # --- one entry -------------------------------------------------------------------------------------------------

    def _begin(self, frame: Frame, message: Message | Invalid, position: int | None) -> "Reply | Pending":
        """The reply, or a coroutine that will give it."""
        if type(message) is Invalid:
            return self._refused(frame, message, position, message.error)
        method = self._methods.get(message.method)
        if method is None:
            return self._not_found(frame, message, position)
        id = message.id
        if not method.plain or id is UNSET or frame.in_full:
            return self._serve(frame, message, method, position)
        try:
            result = method.function(*method.bind(message.params))
        except BaseException as error:
            return self._failure(frame, message, method, error)
        kind = type(result)
        if kind in _CONSTANT and (kind is not str or len(result) < COUNTED):
            return Success(result, id)
        if kind is types.CoroutineType:
            return self._step(frame, message, id, method, result)
        return self._finish(frame, message, id, method, settled(result))

    def _step(self, frame: Frame, message: Message, id: Id, method: Method, coroutine: Any) -> "Reply | Pending":
        """A coroutine that ends without waiting is run on the spot: 1.4 times faster than awaiting it, in a batch of 50."""
        try:
            return self._finish(frame, message, id, method, resume(coroutine, coroutine.send(None)))
        except StopIteration as finished:
            result = finished.value
        except BaseException as error:
            return self._failure(frame, message, method, error)
        if type(result) in _CONSTANT and (type(result) is not str or len(result) < COUNTED):
            return Success(result, id)
        try:
            answer = self._sealed(frame, result, id)
        except BaseException as error:
            return self._failure(frame, message, method, error)
        return answer if type(answer) is Success or frame.alone else _after_a_turn(answer)

    async def _finish(self, frame: Frame, message: Message, id: Id, method: Method, awaitable: Awaitable[Any]) -> Reply:
        try:
            answer = self._sealed(frame, await awaitable, id)
            return answer if type(answer) is Success or frame.alone else await _after_a_turn(answer)
        except BaseException as error:
            return self._failure(frame, message, method, error)

    async def _serve(self, frame: Frame, message: Message, method: Method, position: int | None) -> Reply:
        """One entry through all the steps."""
        started = time.perf_counter()
        context: Context | None = None
        reply: Reply
        try:
            context = self._policy.admit(message, method, caller=frame.caller, position=position, key=frame.key)
            context._frame = frame
            result = await self._guarded(context)
            if context.id is UNSET:
                reply = None
            elif result is context._result and type(result) is Raw:
                reply = self._kept(frame, result, memoryview(result).nbytes, context.id)
            else:  # a constant, or what a middleware gave in its place
                reply = self._sealed(frame, result, context.id)
            if type(reply) is Failure and not frame.alone:
                reply = await _after_a_turn(reply)
        except BaseException as error:
            reply = self._failure(frame, message, method, error, context)
        if frame.logged:
            self._log(message, position, reply, started, context)
        return None if context is not None and context.is_notification else reply

    async def _run(self, context: Context) -> Any:
        """Steps 4 to 6, inside the middleware, which sees the result as the bytes that will be sent."""
        context._reached = True
        method, frame = context._method, context._frame
        args, keywords = method.signature.bind_all(context.params, context)
        call = partial(method.function, *args, **keywords)
        if method.blocking and not frame.alone:
            call = partial(in_thread, call)
        if context._shape is not None:
            call = partial(_shape, context._shape, call)
        if context.idempotency_key is None and method.terms.on_crash == "transactional":
            # Its transaction is that of its record, and a record needs a key. Without one, each call is a new intent.
            context.idempotency_key = new_nonce().hex()
        if context.idempotency_key is None:
            result = await self._unprotected(method, context, call)
            lazy = type(result) in _CONSTANT and not frame.in_full
            context._result = result if lazy else Raw(frames.encode(result))
            return context._result
        identity = fingerprint(context.params)
        try:
            context._result = (await self._commands.execute(context, method, identity, call, alone=frame.alone)).result
        finally:
            if context.replayed and frame.replayed is not None:
                frame.replayed.append(context.id)
        return context._result

    async def _unprotected(self, method: Method, context: Context, call: Call) -> Any:
        if self._note is None or not method.is_command:
            return await self._in_time(method, call, context._frame)
        noted = Noted(self._note, context, fingerprint(context.params))
        try:
            result = await self._in_time(method, call, context._frame)
        except BaseException as error:
            noted(error)
            raise
        noted()
        return result

    async def _in_time(self, method: Method, call: Call, frame: Frame) -> Any:
        if method.timeout is None or frame.alone:
            return await settled(call())
        deadline = asyncio.timeout(method.timeout)
        try:
            async with deadline:
                return await settled(call())
        except TimeoutError:
            if not deadline.expired():
                raise
            # An unprotected command was cut somewhere in the middle; a query changes nothing wherever it is cut.
            raise DeadlineExceeded(ran="unknown" if method.is_command else "no") from None

    # --- errors ----------------------------------------------------------------------------------------------------

    def _not_found(self, frame: Frame, message: Message, position: int | None) -> Reply:
        try:
            frames.check_params_shape(message.params)
        except RpcError as error:
            return self._refused(frame, message, position, error)
        refused = self._refused(frame, message, position, MethodNotFound(f"there is no method {message.method[:100]!r}"))
        return None if message.id is UNSET else refused  # P6: a notification to an unknown method is met with silence

    def _refused(self, frame: Frame, message: Message | Invalid, position: int | None, error: RpcError) -> Failure:
        refusal = failure(None if message.id is UNSET else message.id, error)
        if frame.logged:
            self._log(message, position, refusal, time.perf_counter(), None)
        return refusal

    def _failure(
        self, frame: Frame, message: Message, method: Method, error: BaseException, context: Context | None = None
    ) -> Failure:
        """What a failed call is answered with. What is not a call's failure goes on up."""
        if isinstance(error, RpcError):
            error = _shape_first(message, error)
        elif frame.alone and is_waiting(error):
            raise CannotWait from error
        else:
            error = self._as_error(method.name, context.correlation_id if context else correlation_of(message.id), error)
        return failure(None if message.id is UNSET else message.id, error)

    def _log(
        self, message: Message | Invalid, position: int | None, reply: Reply, started: float, context: Context | None
    ) -> None:
        name = "" if type(message) is Invalid else message.method
        method = self._methods.get(name)
        word = "replayed" if context and context.replayed else "error" if type(reply) is Failure else "ok"
        called(
            correlation_id=context.correlation_id if context else correlation_of(message.id),
            method=name[:100],
            kind=method.kind.value if method else None,
            position=position,
            duration_ms=(time.perf_counter() - started) * 1000,
            outcome=word,
            code=reply.error.code if type(reply) is Failure else None,
            caller=context and (context.caller or None),
            idempotency_key=context and context.idempotency_key,
        )

    # --- the reply -------------------------------------------------------------------------------------------------

    def _sealed(self, frame: Frame, result: Any, id: Id) -> Answer:
        """Return the answer with a result that cannot change any more."""
        if type(result) is str:
            return self._kept(frame, result, len(result), id)
        if type(result) in _CONSTANT:
            return Success(result, id)
        data = frames.encode(result)
        return Success(Raw(data), id) if len(data) < COUNTED else self._kept(frame, Raw(data), len(data), id)

    def _kept(self, frame: Frame, result: str | Raw, size: int, id: Id) -> Answer:
        """Return the answer, or an error if the results of the batch are too long with this one.

        Here and not when the reply is written, so that no batch keeps more than one reply may hold.
        """
        if frame.room is not None:
            if size > frame.room:
                return failure(id, self._too_long())
            frame.room -= size
        return Success(result, id)

    def _seal(self, answer: Answer) -> bytes:
        """One answer as bytes. A result that cannot be sent costs its own entry, and no other."""
        try:
            data = frames.write(answer)
        except EncodeError as error:
            failed("a reply", correlation_of(answer.id), error)
            return frames.encode(failure(answer.id, InternalError()))
        return data if len(data) <= self._policy.limits.bytes_out else frames.encode(failure(answer.id, self._too_long()))

    def _seal_batch(self, answers: list[Answer]) -> bytes:
        """One encode for all; only if that fails, or is too long, one by one."""
        try:
            data = frames.write_batch(answers)
            if len(data) <= self._policy.limits.bytes_out:
                return data
        except EncodeError:
            pass
        room = self._policy.limits.bytes_out
        sealed = []
        for answer in answers:
            data = self._seal(answer)
            data = data if len(data) <= room else frames.encode(failure(answer.id, self._too_long()))
            room -= len(data)
            sealed.append(data)
        return make_batch(sealed)

    def _too_long(self) -> InternalError:
        limit = self._policy.limits.bytes_out
        reason = f"the reply is longer than {limit} bytes"
        return InternalError(reason, type="limit_exceeded", limit="bytes_out", max=limit, ran="yes")


async def _after_a_turn(refused: Answer) -> Answer:
    """Let other calls run after a result that was too long: to make and to write it took a while."""
    await asyncio.sleep(0)
    return refused


def _shape(shape: Callable[[Any], Any], call: Call) -> Any:
    """A call whose value is made what the caller gets, before it is recorded."""
    result = call()
    return _shape_later(shape, result) if hasattr(result, "__await__") else _shape_now(shape, result)


async def _shape_later(shape: Callable[[Any], Any], result: Any) -> Any:
    return _shape_now(shape, await settled(result))


def _shape_now(shape: Callable[[Any], Any], value: Any) -> Any:
    try:
        return shape(value)
    except EncodeError as error:  # the handler has not failed: what it did is done, and recorded as that
        return _Unwritable(error)


class _Unwritable:
    """In place of a result that JSON cannot carry: who encodes it hears why."""

    def __init__(self, error: EncodeError) -> None:
        self._error = error

    def model_dump(self, mode: str) -> Any:
        raise self._error


def _key_for_many() -> UsageError:
    return UsageError(
        "handle(array, key=...): a key beside a message is that of a single call.",
        "with one key for all, every entry would be taken for a repetition of the first, or refused",
        "give each entry its own: params.idempotency_key",
    )


def _guard(middleware: Sequence[Middleware], innermost: Next) -> Next:
    """The middleware around the call, the first one outermost."""
    call = innermost
    for layer in reversed(middleware):
        call = _around(layer, call)
    return _refusing(call) if middleware else call


def _around(layer: Middleware, inner: Next) -> Next:
    return lambda context: layer(context, inner)


def _refusing(guarded: Next) -> Next:
    """A call that its middleware refused has not run, whatever the code of the error says."""

    async def call(context: Context) -> Any:
        try:
            return await guarded(context)
        except RpcError as error:
            if context._reached or error.ran == "no":
                raise
            told = error.data if isinstance(error.data, dict) else {} if error.data is None else {"data": error.data}
            # A copy: the middleware may raise the same object for another call, after that has run.
            refusal = rebuilt(type(error), error.code, error.message, {**told, "ran": "no"})
            refusal.is_remote = error.is_remote
            raise refusal from error

    return call


def _shape_first(message: Message, error: RpcError) -> RpcError:
    """Params that are neither array nor object make the request invalid, whatever the binding said about them."""
    if isinstance(error, InvalidParams):
        try:
            frames.check_params_shape(message.params)
        except RpcError as shape:
            return shape
    return error


def _is_cancelled(error: BaseException) -> bool:
    """Whether this call is being cancelled, in contrast to a handler that lets somebody else's cancellation escape."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return False
    return task is not None and task.cancelling() > 0
