"""The commands of an app: claim them, run them, record their outcomes, and stop.

`Commands.execute` is steps 5 and 6 of a call. There are three state machines here: the run of a
command (`run.TABLE`), the receipt of a call without a key (`receipts.TABLE`), and the ledger as
this process sees it (`witness.TABLE`).

    claim        whose run is it: this one, one in this process, or one elsewhere
    lease        run the handler under a lease, and record its outcome
    transaction  claim, run and record in one transaction of the store
    outcome      the handler's outcome, or the reason why there is none
    receipts     whether the answer to a call without a key reached its caller
    background   writes that failed, leases, sweeps
    witness      whether the ledger is still the one that this process knew

1. Nothing runs before the ledger has granted the command to this run.
2. A handler that can wait runs in its own task. Its caller may leave or run out of time: before the
   commit point, that cancels the handler and releases the record; after it the handler finishes,
   and its outcome is recorded.
3. A handler that cannot wait runs in its caller's task: nothing can interrupt it.
4. If the ledger is down before the run, the command is refused. If it goes down after it, the
   caller still gets the true outcome, and recording it is retried.
5. An app that stops claims nothing more, and gives handlers past their commit point time to finish.
6. An app belongs to one event loop at a time. When that loop is closed, the next one takes over.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec import Raw

from wirecall.aio import start
from wirecall.commands.background import Background
from wirecall.commands.claim import Claims
from wirecall.commands.lease import Leases
from wirecall.commands.outcome import answer, call_now, in_progress, stopping
from wirecall.commands.receipts import (
    KeylessReceipt,
    ReceiptEvent,
    Receipts,
    Report,
    Strangers,
    origin_of,
    recognised,
)
from wirecall.commands.run import Run
from wirecall.commands.transaction import Transactions
from wirecall.commands.witness import Witness, reason_of
from wirecall.errors import Busy, KeyInProgress, LedgerUnavailable, OtherLoop, OutcomeUnknown
from wirecall.ledger.base import Claim, Keyless, Ledger, LedgerDown, Outcome, RecordId
from wirecall.server.call import Call, Handler, InputRequired

# Seconds that a stop waits for handlers that ignore their cancellation.
LAST_WORDS = 1.0


class Commands:
    """The commands of an app that are in flight in this process."""

    def __init__(self, ledger: Callable[[], Awaitable[Ledger]], report: Report) -> None:
        # The number of commands that continue although their callers have left.
        self.left = 0
        self.witness = Witness()
        self._ledger = ledger
        self._report = report
        self._strangers = Strangers()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin(Background())

    def _begin(self, background: Background) -> None:
        """Begin without any runs."""
        self.witness.look_first()
        self.witness.moved = background.renew_all
        self.left = 0
        self._tasks: dict[Run, asyncio.Task[Raw | BaseException]] = {}
        self._background = background
        self._receipts = Receipts(background, self._strangers, self._report)
        self._claims = Claims(self._ledger, background, self._receipts, self.witness)
        self._transactions = Transactions(background, self._receipts, self.witness)
        self._leases = Leases(background, self._claims, self._transactions)

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to the running loop. The runs of a closed loop never end, so they are forgotten."""
        if self._loop is loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise OtherLoop
            background = Background()
            background.closing = self._background.closing
            self._begin(background)
        self._loop = loop
        self._background.plan_sweep(self._ledger)

    # --- a call -----------------------------------------------------------------------------------

    def execute(self, call: Call, handler: Handler) -> Coroutine[Any, Any, Raw]:
        """Run the command, or answer with the outcome of an earlier run."""
        method = call.method
        frame = call.frame
        terms = method.terms
        assert call.fingerprint is not None
        loop: asyncio.AbstractEventLoop | None = None
        if not frame.alone:
            loop = asyncio.get_running_loop()
            if loop is not self._loop:
                self._bind(loop)
        nonce = os.urandom(16)
        peer = call.peer
        key = call.key
        keyless: Keyless | None = None
        if key is None:
            keyless = Keyless(self._digest_of(call, call.fingerprint), terms.loss_window)
            key = call.key = keyless.make_key(nonce)
            if peer is not None:
                peer.named(key)
            if loop is None:
                keyless = None  # there is no transport that could lose the answer
        follows = call.follows
        if peer is not None:
            follows = peer.continues
        params: bytes | None = None
        if method.shown is not None:
            params = method.shown(call.params)
        task = call.task
        claim = Claim(
            id=RecordId(frame.sender.caller, call.record, key),
            fingerprint=call.fingerprint,
            nonce=nonce,
            lease=terms.lease,
            retention=terms.retention,
            on_crash=terms.on_crash,
            # A task counts as past its commit point when its handler starts: until then any process
            # may take it over.
            committed=not terms.commit_point and (task is None or not task.at_once),
            continues=follows is not None,
            alone=frame.alone,
            keyless=keyless,
            params=params,
        )
        run = call.run = Run(method, claim, loop, follows, task)
        run.must_exist = call.follows is not None
        if keyless is None:
            return self._run(call, run, handler)
        run.receipt = KeylessReceipt(frame.sender.receipt)
        return self._run_keyless(call, run, run.receipt, handler)

    def _digest_of(self, call: Call, fingerprint: bytes) -> bytes | None:
        """Return the digests by which a call without a key is compared with others.

        None: several senders could repeat it.
        """
        origin = origin_of(call.frame.unique_sender(), call.record)
        if origin is None:
            if self._strangers.lost:
                self._strangers.warn(call)
            return None
        # The digest is short, since the key holds it too. If 8 bytes do not distinguish two params,
        # their fingerprints do: the call is refused with a conflict, and never gets the other
        # answer.
        return origin + fingerprint[:8]

    async def _run_keyless(
        self, call: Call, run: Run, receipt: KeylessReceipt, handler: Handler
    ) -> Raw:
        """Run the command of a call without a key, and note what becomes of its answer."""
        receipts = self._receipts
        has_equals = receipts.expect(call, run, receipt)
        try:
            if has_equals or receipt.is_late:
                await self._notice(call, run, receipt)
            return await self._run(call, run, handler)
        except BaseException as error:
            if _must_retry(error):
                receipts.abandon(call, run)
            elif isinstance(error, OutcomeUnknown) or run.stays_unknown:
                receipt.accept(ReceiptEvent.DOUBT)
            raise
        finally:
            receipts.end(run, receipt)

    async def _notice(self, call: Call, run: Run, receipt: KeylessReceipt) -> None:
        """Give equal calls a moment to lose their callers, unless this one came too late."""
        try:
            if not receipt.is_late:
                await self._receipts.notice(run)
            if receipt.is_lost:  # a repetition has overtaken it, or will come
                raise in_progress()
        except BaseException as error:
            if call.frame.reported:
                self._report(call, error)
            raise

    async def _run(self, call: Call, run: Run, handler: Handler) -> Raw:
        """Run the command of a claim, or answer with the outcome of an earlier run."""
        # Step 1: whose run is it? Another run answers for this call, or the ledger has granted the
        # record.
        try:
            found = await self._claims.claim(run)
            if run.claim.id.key != call.key:
                recognised(call, run)
            if found is not None:
                call.replayed = True
                result = answer(found, replayed=True)
        except BaseException as error:
            # A recorded error is a replay too, and so is the task that an earlier call has become.
            if isinstance(error, InputRequired):
                call.replayed = True
            if call.frame.reported:
                self._report(call, error)
            raise
        if found is not None:
            if call.frame.reported:
                self._report(call, None)
            return result

        # Step 2: a function that cannot wait is called here and now: nothing interrupts it. It may
        # still return an awaitable.
        waits = run.method.can_wait
        if not waits:
            called = call_now(run, handler)
            waits = hasattr(called.value, "__await__")
            handler = called

        # Step 3: lead the run to its end. A handler that waits gets its own task.
        if waits and run.loop is not None:
            return await self._run_apart(call, run, handler, run.loop)
        ending = await self._lead(call, run, handler)
        if isinstance(ending, BaseException):
            raise ending
        return ending

    async def _run_apart(
        self, call: Call, run: Run, handler: Handler, loop: asyncio.AbstractEventLoop
    ) -> Raw:
        """Lead a run in its own task.

        The task wakes this one: awaiting the task costs one more iteration of the loop. A cancel of
        this wait cancels the command only if nothing is done yet.
        """
        ended = run.ended = loop.create_future()
        task = start(loop, self._lead(call, run, handler), name=run.method.name)
        self._tasks[run] = task
        try:
            result: Raw = await ended
        except asyncio.CancelledError:
            if run.stops and not task.done():
                run.cancel(task)
                await asyncio.wait([task], timeout=LAST_WORDS)
            if not task.done():
                self.left += 1
                task.add_done_callback(self._note_end)
            raise
        # The transport's listener holds the run, and need not hold the answer.
        run.ended = None
        return result

    def _note_end(self, _: "asyncio.Task[Raw | BaseException]") -> None:
        """Called when a command has ended whose caller has left."""
        self.left -= 1

    async def _lead(self, call: Call, run: Run, handler: Handler) -> Raw | BaseException:
        """Lead the run to its end; wake the duplicates, and the caller if it waits elsewhere."""
        outcome: Outcome | None = None
        ending: Raw | BaseException
        try:
            if run.claims_in_transaction:
                outcome, call.replayed = await self._transactions.transact(
                    call, run, handler, has_record=False
                )
            else:
                outcome, call.replayed = await self._leases.hold(call, run, handler)
            ending = answer(outcome, replayed=call.replayed, recorded=call.recorded)
        except BaseException as error:
            ending = error
        self._claims.land(run, outcome)
        if run.receipt is not None:
            self._receipts.landed(run, run.receipt)
        if call.frame.reported:
            self._report(call, _error_in(ending))
        if run.ended is None:
            return ending
        self._tasks.pop(run, None)
        if isinstance(ending, Raw):
            if not run.ended.done():  # else the caller has left
                run.ended.set_result(ending)
            return ending
        _wake_with(run, run.ended, ending)
        if isinstance(
            ending, (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
        ):
            raise ending
        return ending

    # --- tasks ------------------------------------------------------------------------------------

    async def hand_over(self, run: Run, id: str, document: bytes, ttl: float) -> bool:
        """Turn a run into a task; False if it ended or lost its record.

        Duplicates now ask the ledger.
        """
        assert run.ledger is not None
        if run.token is None or not await run.ledger.begin_task(run.token, id, document, ttl):
            return False
        self._claims.land(run, None)
        return True

    def open(self) -> None:
        """Sweep the ledger from now on, also before the first command.

        A process that died may have left records.
        """
        self._bind(asyncio.get_running_loop())

    async def doubt(self) -> str | None:
        """Return why commands are refused although the ledger answers, or None."""
        ledger = await self._ledger()
        if not ledger.outlives:
            return None
        self._bind(asyncio.get_running_loop())
        await self.witness.look(ledger)
        self._background.plan_look(self.witness, ledger)
        if self.witness.doubt is None:
            return None
        return reason_of(self.witness.doubt)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as background work, which `aclose` waits for."""
        self._bind(asyncio.get_running_loop())
        self._background.start(work)

    def cancel(self, id: RecordId) -> None:
        """Cancel the run of a record in this process, if it has done nothing yet."""
        for run, task in self._tasks.items():
            if run.claim.id == id and run.stops:
                run.cancel(task)

    # --- the end ----------------------------------------------------------------------------------

    async def aclose(self, grace: float) -> None:
        """Stop claiming, and end runs that have done nothing yet.

        Handlers past their commit point may finish within `grace`.
        """
        self._bind(asyncio.get_running_loop())
        self._background.stop()
        for run, task in list(self._tasks.items()):
            if run.stops:
                run.cancel(task)
        in_flight = [*self._background.tasks, *self._claims.flights()]
        if in_flight:
            await asyncio.wait(in_flight, timeout=grace)
        self.witness.stop()
        runs = dict(self._tasks)
        left = [*runs.values(), *self._background.tasks]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=LAST_WORDS)
        for run, task in runs.items():
            if task.done():  # a task that was cancelled before it began could not wake its caller
                self._tasks.pop(run, None)
                if run.ended is not None and not run.ended.done():
                    run.ended.set_exception(stopping(run))


def _must_retry(error: BaseException) -> bool:
    """Return whether a call ends without the outcome: its caller leaves, or must send it again."""
    if isinstance(error, Busy):
        return isinstance(error.__cause__, LedgerDown)  # else it is the handler's own answer
    return isinstance(error, (asyncio.CancelledError, KeyInProgress, LedgerUnavailable))


def _error_in(ending: Raw | BaseException) -> BaseException | None:
    if isinstance(ending, Raw):
        return None
    return ending


def _wake_with(run: Run, ended: "asyncio.Future[Raw]", error: BaseException) -> None:
    """Wake the caller of a run that has ended with an error, unless the caller has left."""
    if ended.done() or isinstance(error, GeneratorExit):  # the loop is closed
        return
    if isinstance(error, asyncio.CancelledError):
        error = stopping(run)
    ended.set_exception(error)
