"""The life of one command with a key: claim, run, record, or answer from the record.

`Commands.execute` is step 5 and 6 of a call. This file decides who waits, what an interruption means, and what happens when
the app stops. Whose run it is, is in `claims`; a run is led to its end in `leases` or, for methods that are transactional,
in `transactions`.

The rules of the file:

1. A handler that can wait runs in a task of its own. Its caller may go away or run out of time; before the commit point
   that cancels the handler and releases the record, after it the handler finishes and its outcome is recorded.
2. A handler that cannot wait runs in its caller's task: nothing can interrupt it.
3. An app that stops claims nothing more, and gives handlers past their commit point time to finish.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from wirecall.commands.background import Chores
from wirecall.commands.claims import Claims
from wirecall.commands.endings import stopping
from wirecall.commands.handlers import called
from wirecall.commands.leases import Leases
from wirecall.commands.outcome import Sealed, answer
from wirecall.commands.run import Call, Note, Noted, Run, not_noted
from wirecall.commands.transactions import Transactions
from wirecall.errors import DeadlineExceeded
from wirecall.ledger.base import Claim, Ledger, Outcome, RecordId
from wirecall.process import new_nonce
from wirecall.server.context import Context
from wirecall.server.method import Method
from wirecall.tasks import at_home, is_alive, start, wait_for_all

# How long we wait for handlers that do not heed their cancellation.
LAST_WORDS = 1.0


class Commands:
    """The commands of an app that are under way in this process."""

    def __init__(self, ledger: Callable[[], Awaitable[Ledger]], note: Note | None = None) -> None:
        self.left = 0  # commands that go on although their callers have left
        self._note = note
        self._runs: dict[Run, asyncio.Task[None]] = {}
        self._chores = Chores()
        self._claims = Claims(ledger, self._chores)
        self._leases = Leases(self._chores)
        self._transactions = Transactions(self._claims.open, self._chores)

    def execute(
        self, context: Context, method: Method, fingerprint: bytes, call: Call, *, alone: bool
    ) -> Coroutine[Any, Any, Sealed]:
        """Run the command, or answer from the run there was. `alone` means: no event loop, so nothing may wait."""
        claim = Claim(
            id=RecordId(context.caller, context.record, context.idempotency_key or ""),
            fingerprint=fingerprint,
            nonce=new_nonce(),
            lease=method.terms.lease,
            retention=method.terms.retention,
            on_crash=method.terms.on_crash,
            committed=not method.terms.commit_point,
            continues=context._peer is not None and context._peer.continues,
            alone=alone,
        )
        run = context._command = Run(method, context, claim, alone)
        return self._serve(run, call) if method.timeout is None or alone else self._serve_in_time(run, call)

    # --- the caller's side -------------------------------------------------------------------------------------------

    async def _serve_in_time(self, run: Run, call: Call) -> Sealed:
        deadline = asyncio.timeout(run.method.timeout)
        try:
            async with deadline:
                return await self._serve(run, call)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(ran="unknown" if run.goes_on or run.others else "no") from None

    async def _serve(self, run: Run, call: Call) -> Sealed:
        context = run.context
        noted = Noted(self._note, context, run.claim.fingerprint) if self._note else not_noted
        try:
            found = await self._claims.found(run)
            if found is not None:
                context.replayed = True
                sealed = answer(found, replayed=True)
                noted()
                return sealed
        except BaseException as error:
            noted(error)
            raise
        can_wait = run.method.can_wait
        if not can_wait:
            call, can_wait = called(call, run.method.straight)
        if can_wait and not run.alone:
            return await self._watch(run, call, noted)
        return await self._body(run, call, noted)

    async def _watch(self, run: Run, call: Call, noted: Callable[..., None]) -> Sealed:
        """Wait for the task of a command; what interrupts the wait interrupts the command only if it has done nothing."""
        assert run.loop is not None
        run.ended = run.loop.create_future()
        task = self._runs[run] = start(run.loop, self._apart(run, call, noted))
        try:
            sealed: Sealed = await run.ended
            return sealed
        except asyncio.CancelledError:
            if not run.goes_on and not task.done():
                _cancel(task, run)
                await asyncio.wait([task], timeout=LAST_WORDS)
            if not task.done():
                self.left += 1
                task.add_done_callback(self._back)
            raise

    def _back(self, _: "asyncio.Task[None]") -> None:
        self.left -= 1

    # --- the command's side ------------------------------------------------------------------------------------------

    async def _apart(self, run: Run, call: Call, noted: Callable[..., None]) -> None:
        """The task of a command. Its caller, if it is still there, is told from within: to ask the task when it is done
        takes a turn of the loop more, and a callback that forgets the task another one."""
        try:
            self._ended(run, await self._body(run, call, noted))
        except asyncio.CancelledError:
            self._ended(run, error=stopping(run))
            raise
        except GeneratorExit:  # there is no loop any more
            raise
        except BaseException as error:
            self._ended(run, error=error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise

    def _ended(self, run: Run, sealed: Sealed | None = None, error: BaseException | None = None) -> None:
        self._runs.pop(run, None)
        if run.ended is None or run.ended.done():  # the caller is gone; what happened is in the ledger and in the log
            return
        if error is None:
            run.ended.set_result(sealed)
        else:
            run.ended.set_exception(error)

    async def _body(self, run: Run, call: Call, noted: Callable[..., None]) -> Sealed:
        outcome: Outcome | None = None
        try:
            mode = self._transactions if run.claim.on_crash == "transactional" else self._leases
            outcome, run.context.replayed = await mode.lead(run, call)
            sealed = answer(outcome, replayed=run.context.replayed, recorded=run.context.recorded)
        except BaseException as error:
            noted(error)
            raise
        finally:
            self._claims.land(run, outcome)
        noted()
        return sealed

    # --- the end -----------------------------------------------------------------------------------------------------

    async def aclose(self, grace: float) -> None:
        """Stop claiming, release what has done nothing yet, let handlers past their commit point finish within `grace`."""
        self._stop()
        under_way = [*self._chores.under_way(), *self._claims.under_way()]
        await wait_for_all(under_way, grace)
        runs = dict(self._runs)
        left = [*filter(is_alive, runs.values()), *self._chores.under_way()]
        for task in left:
            at_home(task, task.cancel)
        await wait_for_all(left, LAST_WORDS)
        for run, task in runs.items():
            if task.done():  # one that was cancelled before it began could not tell its caller
                at_home(task, partial(self._ended, run, error=stopping(run)))

    def _stop(self) -> None:
        self._chores.stop()
        self._leases.rest()
        for run, task in list(self._runs.items()):
            if not run.goes_on and is_alive(task):
                at_home(task, _cancel, task, run)
        self._chores.wake()


def _cancel(task: "asyncio.Task[None]", run: Run) -> None:
    """Between two transitions a cancel would leave the record in doubt, so there the run only sees the wish."""
    run.cancelled = True
    if run.interruptible:
        task.cancel()
