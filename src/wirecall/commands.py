"""The life of one command with a key: claim, run, record, or answer from the record.

`Commands.execute` is step 5 and 6 of a call. The states and their transitions are in `ledger.base`; this file decides who
waits, who runs, what an interruption means, and what is said to the caller.

The rules of the file:

1. A command runs in a task of its own. The caller may go away or run out of time; before the commit point that cancels the
   command and releases its record, after it the handler finishes and its outcome is recorded.
2. Duplicates in this process await the first (`_Flight`); duplicates elsewhere are seen through the ledger, by claiming
   again.
3. Nothing runs before the ledger gave back a record with our nonce.
4. An outcome is encoded once; the same bytes are recorded and sent.
5. A ledger that is lost before the run refuses the command; one that is lost after it costs the caller nothing: the true
   outcome is answered, and recording it is tried until it succeeds.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import msgspec
from msgspec import Raw, Struct

from wirecall.errors import (
    DeadlineExceeded,
    EncodeError,
    InternalError,
    KeyConflict,
    KeyInProgress,
    LedgerUnavailable,
    OutcomeUnknown,
    ResultNotRetained,
    RpcError,
    UsageError,
)
from wirecall.jsonrpc import ErrorObject, encode, failure
from wirecall.ledger.base import (
    Claim,
    CommitUnknown,
    Ledger,
    LedgerDown,
    Locked,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
    Transaction,
    TryAgain,
    new_nonce,
)
from wirecall.logs import failed, logger
from wirecall.methods import CannotTell, Context, Done, Method, NotDone

# How often a duplicate looks whether the first, in another process, is done: at once at first, never rarely.
FIRST_POLL = 0.025
LAST_POLL = 0.5
RETRY_AFTER_MS = 1000

# A transaction that the store undid is tried again; nothing of it has escaped.
TRANSACTION_TRIES = 5

Call = Callable[[], Awaitable[Any]]


class Sealed(Struct, frozen=True):
    """A result as bytes, and whether it comes from the ledger."""

    result: Raw
    replayed: bool = False


class Run:
    """A command under way, as its handler's context sees it."""

    def __init__(self, commands: "Commands", method: Method, claim: Claim, correlation_id: Any) -> None:
        self._commands = commands
        self.method = method
        self.claim = claim
        self.correlation_id = correlation_id
        self.token: Token | None = None
        self.attempt = 1
        self.fence = 0
        self.committed = False
        self.interruptible = False
        self.cancelled = False
        self.db: Any = None
        self.loop: asyncio.AbstractEventLoop | None = None  # None: no event loop, nothing may wait

    @property
    def downstream_key(self) -> str:
        id = self.claim.id
        text = "\0".join((id.caller, id.method, id.key)).encode()
        return hmac.new(b"wirecall downstream key", text, hashlib.sha256).hexdigest()[:32]

    def granted(self, record: Record) -> None:
        self.token = record.token
        self.attempt = record.attempts
        self.fence = record.fence
        self.committed = not self.method.terms.commit_point

    def commit_point(self) -> Awaitable[None]:
        """From the moment of the call the run counts as committed here; the awaitable writes that to the ledger."""
        first, self.committed = not self.committed, True
        if not first or self.db is not None:
            return _Nothing()
        written = self._write_commit_point()
        if self.method.is_async:
            return written
        if self.loop is None:
            return _step(written)
        asyncio.run_coroutine_threadsafe(written, self.loop).result()
        return _Nothing()

    async def _write_commit_point(self) -> None:
        assert self.token is not None
        ledger = await self._commands.ledger()
        if self.cancelled or not await ledger.commit_point(self.token, self.method.terms.lease):
            self.committed = False
            raise LostLease(f"{self.claim.id}: the lease was over before the commit point")


class LostLease(Exception):
    """Another holder took the command over: this one must stop before its effect."""


class _Nothing:
    """Awaited or not, it does nothing."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


def _step(coroutine: Coroutine[Any, Any, None]) -> Awaitable[None]:
    try:
        coroutine.send(None)
    except StopIteration:
        return _Nothing()
    coroutine.close()
    raise UsageError("ctx.commit_point() had to wait.", "there is no event loop", "use `await app.handle(...)`")


class Commands:
    """The commands of an app that are under way in this process."""

    def __init__(self, ledger: Callable[[], Awaitable[Ledger]]) -> None:
        self.ledger = ledger
        self.closing = False
        self._flights: dict[RecordId, _Flight] = {}
        self._runs: dict[Run, asyncio.Task[Sealed]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def execute(self, context: Context, method: Method, fingerprint: bytes, call: Call, *, alone: bool) -> Sealed:
        """Run the command, or answer from the run there was. `alone` means: no event loop, so nothing may wait."""
        key = context.idempotency_key
        assert key is not None
        id = RecordId(context.caller, method.name, key)
        while flight := self._flights.get(id):
            outcome = await flight.join(fingerprint, method.terms.wait)
            if outcome is not None:
                return _answer(outcome, replayed=True)
        claim = Claim(
            id=id,
            fingerprint=fingerprint,
            nonce=new_nonce(),
            lease=method.terms.lease,
            retention=method.terms.retention,
            on_crash=method.terms.on_crash,
            committed=not method.terms.commit_point,
        )
        run = context._command = Run(self, method, claim, context.correlation_id)
        performance = self._perform(run, context, call, self._flights.setdefault(id, _Flight(fingerprint)))
        if alone:
            return await performance
        run.loop = asyncio.get_running_loop()
        task = self._runs[run] = self._spawn(performance)
        task.add_done_callback(lambda _: self._runs.pop(run))
        return await self._watch(task, run)

    async def aclose(self, grace: float) -> None:
        """Stop claiming, release what has done nothing yet, let handlers past their commit point finish within `grace`."""
        self.closing = True
        for run, task in self._runs.items():
            if not run.committed:
                self._cancel(task, run)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- the caller's side -------------------------------------------------------------------------------------------

    async def _watch(self, task: "asyncio.Task[Sealed]", run: Run) -> Sealed:
        deadline = asyncio.timeout(run.method.timeout)
        try:
            async with deadline:
                return await asyncio.shield(task)
        except (TimeoutError, asyncio.CancelledError):
            if task.done():
                return self._ended(task, run)
            stopped = await self._interrupt(task, run)
            if deadline.expired():
                raise DeadlineExceeded(ran="no" if stopped else "unknown") from None
            raise

    def _ended(self, task: "asyncio.Task[Sealed]", run: Run) -> Sealed:
        if task.cancelled():  # by aclose
            raise LedgerUnavailable("the server is stopping", ran="unknown" if run.committed else "no")
        return task.result()

    async def _interrupt(self, task: "asyncio.Task[Sealed]", run: Run) -> bool:
        """End a command that has done nothing yet; leave one that may have."""
        if run.committed:
            return False
        self._cancel(task, run)
        await asyncio.wait([task])
        return not run.committed

    def _cancel(self, task: "asyncio.Task[Sealed]", run: Run) -> None:
        """Between two transitions a cancel would leave the record in doubt, so there the run only sees the wish."""
        run.cancelled = True
        if run.interruptible:
            task.cancel()

    def _spawn(self, coroutine: Any) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone; what happened is in the ledger and in the log

    # --- the command's side ------------------------------------------------------------------------------------------

    async def _perform(self, run: Run, context: Context, call: Call, flight: "_Flight") -> Sealed:
        outcome: Outcome | None = None
        try:
            ledger = await self._open()
            transactional = run.claim.on_crash == "transactional"
            lead = self._in_transaction if transactional else self._leased
            outcome, replayed = await lead(ledger, run, context, call)
            return _answer(outcome, replayed=replayed)
        finally:
            self._flights.pop(run.claim.id, None)
            flight.land(outcome)

    async def _open(self) -> Ledger:
        if self.closing:
            raise LedgerUnavailable("the server is stopping", ran="no")
        try:
            return await self.ledger()
        except LedgerDown as error:
            raise self._unavailable(error) from error

    async def _leased(self, ledger: Ledger, run: Run, context: Context, call: Call) -> tuple[Outcome, bool]:
        record = await self._claim(ledger, run)
        if record.nonce != run.claim.nonce:
            return _recorded(record), True
        run.granted(record)
        if run.cancelled:
            await self._give_up(ledger.release(record.token), run)
            raise asyncio.CancelledError
        try:
            with _Heartbeat(self, ledger, run):
                outcome = await self._reconciled(run, context) or await self._handled(run, call)
        except BaseException as error:
            raise await self._stopped(ledger, run, error) from error
        if await self._completed(ledger, run, outcome):
            return outcome, False
        return await self._superseded(ledger, run, outcome)

    async def _claim(self, ledger: Ledger, run: Run) -> Record:
        """Our own record, or one that answers this call; waits for a first run that is under way elsewhere."""
        patience, delay = run.method.terms.wait, FIRST_POLL
        while True:
            try:
                record = await ledger.claim(run.claim)
            except LedgerDown as error:
                self._spawn_if_possible(self._unclaim(run.claim))
                raise self._unavailable(error) from error
            if record.fingerprint != run.claim.fingerprint:
                raise KeyConflict(ran="no")
            if record.nonce == run.claim.nonce or record.state is not State.RUNNING:
                return record
            if patience <= 0 or run.cancelled:
                raise KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS)
            await self._nap(run, min(delay, patience))
            patience -= delay
            delay = min(2 * delay, LAST_POLL)

    async def _nap(self, run: Run, delay: float) -> None:
        run.interruptible = True
        await asyncio.sleep(delay)
        run.interruptible = False

    async def _handled(self, run: Run, call: Call) -> Outcome:
        """Run the handler. Its result and its own errors are outcomes; anything else it raises is not."""
        run.interruptible = True
        try:
            result = await call()
        except RpcError as error:
            return _outcome("error", failure(None, error).error, run.method)
        finally:
            run.interruptible = False
        run.committed = True
        return _outcome("result", result, run.method)

    async def _reconciled(self, run: Run, context: Context) -> Outcome | None:
        if run.claim.on_crash != "reconcile" or run.attempt == 1:
            return None
        run.committed = True
        verdict = await run.method.reconcile(context)
        if isinstance(verdict, Done):
            return _outcome("result", verdict.result, run.method)
        if isinstance(verdict, NotDone):
            run.committed = run.claim.committed
            return None
        if not isinstance(verdict, CannotTell):
            logger.error("%s: reconcile returned %r, not Done, NotDone or CannotTell", run.method.name, verdict)
        raise _CannotTell

    async def _stopped(self, ledger: Ledger, run: Run, error: BaseException) -> BaseException:
        """The handler ended without an outcome: what that leaves in the ledger, and what the caller is told."""
        assert run.token is not None
        if not run.committed:
            await self._give_up(ledger.release(run.token), run)
            return error if _is_ours(error, run) else _internal(error, run, "no")
        if isinstance(error, _CannotTell) or run.claim.on_crash == "unknown":
            await self._give_up(ledger.abandon(run.token), run)
        else:
            await self._give_up(ledger.lapse(run.token), run)
        if isinstance(error, _CannotTell):
            return _unknown(await ledger.get(run.claim.id), run.claim.id)
        return error if isinstance(error, GeneratorExit) else _internal(error, run, "unknown")

    async def _completed(self, ledger: Ledger, run: Run, outcome: Outcome) -> bool:
        assert run.token is not None
        try:
            return await ledger.complete(run.token, _stored(outcome, run.method), run.method.terms.retention)
        except LedgerDown as error:
            logger.error("%s is done but not recorded yet: %s", run.claim.id, error)
            self._spawn_if_possible(self._record_late(ledger, run, outcome))
            return True

    async def _superseded(self, ledger: Ledger, run: Run, outcome: Outcome) -> tuple[Outcome, bool]:
        """Another holder has the record: its outcome counts, and where it has none, ours is the truth about this run."""
        logger.warning("lost lease: %s was taken over while it ran", run.claim.id)
        record = await ledger.get(run.claim.id)
        if record is not None and record.state is State.DONE:
            return _recorded(record), True
        return outcome, False

    def _again(self, run: Run) -> Run:
        claim = msgspec.structs.replace(run.claim, nonce=new_nonce())
        return Run(self, run.method, claim, run.correlation_id)

    # --- one transaction ---------------------------------------------------------------------------------------------

    async def _in_transaction(self, ledger: Any, run: Run, context: Context, call: Call) -> tuple[Outcome, bool]:
        for _ in range(TRANSACTION_TRIES):
            try:
                async with ledger.transaction(run.claim) as transaction:
                    return await self._transact(transaction, run, call)
            except TryAgain:
                context._command = run = self._again(run)
            except Locked:
                raise KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS) from None
            except CommitUnknown as error:
                raise OutcomeUnknown(str(error), ran="unknown", record=str(run.claim.id)) from error
            except LedgerDown as error:
                raise self._unavailable(error) from error
            except RpcError:
                raise
            except BaseException as error:
                if _is_ours(error, run):
                    raise
                raise _internal(error, run, "no") from error
        raise KeyInProgress("the database kept undoing the transaction", ran="no", retry_after_ms=RETRY_AFTER_MS)

    async def _transact(self, transaction: Transaction, run: Run, call: Call) -> tuple[Outcome, bool]:
        record = transaction.record
        if record.fingerprint != run.claim.fingerprint:
            raise KeyConflict(ran="no")
        if record.nonce != run.claim.nonce:
            return _recorded(record), True
        run.granted(record)
        run.committed = False  # until the commit, everything can be undone
        run.db = transaction.db
        outcome = await self._handled(run, call)
        stored = _stored(outcome, run.method)
        await transaction.complete(stored, run.method.terms.retention, undo=outcome.kind == "error")
        run.committed = True
        return outcome, False

    # --- the ledger is away ------------------------------------------------------------------------------------------

    def _unavailable(self, error: LedgerDown) -> LedgerUnavailable:
        logger.error("the ledger is unavailable: %s", error)
        return LedgerUnavailable(ran="no")

    async def _give_up(self, transition: Awaitable[bool], run: Run) -> None:
        try:
            await transition
        except LedgerDown as error:
            logger.error("%s: the ledger could not be told how the run ended: %s", run.claim.id, error)

    def _spawn_if_possible(self, coroutine: Any) -> None:
        try:
            self._spawn(coroutine)
        except RuntimeError:  # no event loop: nobody could wait for it
            coroutine.close()

    async def _unclaim(self, claim: Claim) -> None:
        """A claim whose answer was lost may stand in the ledger; nothing ran, so it is taken back."""

        async def take_back() -> None:
            ledger = await self.ledger()
            record = await ledger.get(claim.id)
            if record is not None and record.nonce == claim.nonce:
                await ledger.release(record.token)

        await self._persist(take_back, claim.lease)

    async def _record_late(self, ledger: Ledger, run: Run, outcome: Outcome) -> None:
        token = run.token
        assert token is not None
        kept, retention = _stored(outcome, run.method), run.method.terms.retention
        await self._persist(lambda: ledger.complete(token, kept, retention), retention)

    async def _persist(self, action: Callable[[], Awaitable[Any]], patience: float) -> None:
        delay = FIRST_POLL
        while patience > 0 and not self.closing:
            try:
                await action()
                return
            except LedgerDown:
                await asyncio.sleep(delay)
                patience -= delay
                delay = min(2 * delay, 5.0)


class _Flight:
    """The one run of a command in this process, and those who wait for it."""

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint
        self._waiting: list[asyncio.Future[Outcome | None]] = []

    async def join(self, fingerprint: bytes, wait: float) -> Outcome | None:
        """The outcome, or None when the run ended without one."""
        if fingerprint != self._fingerprint:
            raise KeyConflict(ran="no")
        future: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            async with asyncio.timeout(wait):
                return await future
        except TimeoutError:
            raise KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS) from None

    def land(self, outcome: Outcome | None) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(outcome)


class _Heartbeat:
    """Renews the lease every third of it, for as long as the handler runs. A short run never gets that far."""

    def __init__(self, commands: Commands, ledger: Ledger, run: Run) -> None:
        self._commands, self._ledger, self._run = commands, ledger, run
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def __enter__(self) -> None:
        self._arm()

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        if self._timer:
            self._timer.cancel()

    def _arm(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no event loop: the handler cannot wait either
            return
        self._timer = loop.call_later(self._run.method.terms.lease / 3, self._beat)

    def _beat(self) -> None:
        self._commands._spawn(self._renew())

    async def _renew(self) -> None:
        assert self._run.token is not None
        try:
            held = await self._ledger.heartbeat(self._run.token, self._run.method.terms.lease)
        except LedgerDown as error:
            logger.warning("%s: no heartbeat: %s", self._run.claim.id, error)
            held = True
        if held and not self._stopped:
            self._arm()


class _CannotTell(Exception):
    """A reconcile function does not know."""


def _outcome(kind: Any, value: Any, method: Method) -> Outcome:
    """An outcome as bytes; of a result that cannot be encoded only the fact remains, since the effect has happened."""
    try:
        payload = encode(value)
    except EncodeError as error:
        logger.error("%s: the result cannot be encoded: %s", method.name, error)
        return Outcome(kind, None, b"")
    return Outcome(kind, payload, hashlib.sha256(payload).digest())


def _stored(outcome: Outcome, method: Method) -> Outcome:
    """What the ledger keeps: of a large result only the digest."""
    if outcome.payload is None or len(outcome.payload) <= method.terms.max_stored_result:
        return outcome
    return Outcome(outcome.kind, None, outcome.digest)


def _answer(outcome: Outcome, *, replayed: bool) -> Sealed:
    if outcome.payload is None:
        raise InternalError(ran="yes")
    if outcome.kind == "result":
        return Sealed(Raw(outcome.payload), replayed)
    raise _as_error(outcome.payload, replayed)


_decode_error = msgspec.json.Decoder(ErrorObject).decode


def _as_error(payload: bytes, replayed: bool) -> RpcError:
    error = _decode_error(payload)
    data = None if error.data is msgspec.UNSET else error.data
    if replayed:
        data = {**data, "replayed": True} if isinstance(data, dict) else {"replayed": True, "data": data}
    return RpcError(error.code, error.message, data)


def _recorded(record: Record) -> Outcome:
    """The outcome a record holds, or the error that says why it holds none."""
    if record.state is State.UNKNOWN:
        raise _unknown(record, record.id)
    assert record.outcome is not None
    if record.outcome.payload is None:
        raise ResultNotRetained(ran="yes", digest=record.outcome.digest.hex(), completed_at=record.completed_at)
    return record.outcome


def _unknown(record: Record | None, id: RecordId) -> OutcomeUnknown:
    known: dict[str, Any] = {} if record is None else {"started_at": record.started_at, "attempts": record.attempts}
    return OutcomeUnknown(ran="unknown", record=str(id), **known)


def _is_ours(error: BaseException, run: Run) -> bool:
    """Whether we stopped the handler, in contrast to a handler that raised such a thing by itself."""
    return isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and run.cancelled)


def _internal(error: BaseException, run: Run, ran: str) -> InternalError:
    failed(run.method.name, run.correlation_id, error)
    return InternalError(ran=ran)
