"""A run under a lease, from the grant to the record of how it ended. The states and their transitions are in `ledger.base`.

The rules of the file:

1. The lease is renewed for as long as the handler runs.
2. What ended without an outcome before the commit point has done nothing, and makes way. After it, the record is left to
   what `on_crash` says.
3. A ledger that is lost after the run costs the caller nothing: the true outcome is answered, and recording it is tried
   until it succeeds.
4. Where another holder has taken over and is done, its outcome counts.
"""

import asyncio
from collections.abc import Awaitable

from wirecall.commands.background import Chores, give_back
from wirecall.commands.endings import is_refusal, told, unavailable
from wirecall.commands.handlers import Undecided, handled, reconciled
from wirecall.commands.outcome import Ended, recorded, stored, unknown
from wirecall.commands.run import Call, Heartbeats, Run
from wirecall.digests import sha256
from wirecall.errors import UsageError
from wirecall.ledger.base import LedgerDown, Outcome, State
from wirecall.logs import logger
from wirecall.server.context import InputRequired


class Leases:
    """The runs under a lease in this process."""

    def __init__(self, chores: Chores) -> None:
        self._chores = chores
        self._heartbeats = Heartbeats(chores.do)

    def rest(self) -> None:
        """No run will come."""
        self._heartbeats.rest()

    async def lead(self, run: Run, call: Call) -> Ended:
        """Run the command that was granted, and record its outcome."""
        try:
            if run.cancelled and not run.committed:
                raise asyncio.CancelledError
            if run.ended is not None:  # else: what is in no task of its own never waits, and is over already
                self._heartbeats.start(run)
            known = await reconciled(run) if run.claim.on_crash == "reconcile" else None
            outcome = known or await handled(run, call)
        except InputRequired as pause:
            raise await self._suspended(run, pause) from pause
        except BaseException as error:
            raise await self._stopped(run, error) from error
        finally:
            if run.ended is not None:
                self._heartbeats.stop(run)
        return await self._completed(run, outcome)

    # --- without an outcome ------------------------------------------------------------------------------------------

    async def _suspended(self, run: Run, pause: InputRequired) -> BaseException:
        """The handler asks its caller something: the record waits for the leg that brings the answer.

        A handler that has passed its commit point on entry has done nothing yet: it asks before it acts, since it is run
        from the top again. One that has marked the point itself has acted, and may not ask any more.
        """
        if run.marked:
            late = UsageError("The handler asked its caller after its commit point.", "it would be run again from the top")
            return await self._stopped(run, late)
        assert run.ledger is not None and run.token is not None
        interim = Outcome("result", pause.interim, sha256(pause.interim))
        try:
            await run.ledger.suspend(run.token, interim, run.method.terms.retention)
        except LedgerDown as error:
            self._chores.unclaim(run.ledger, run.claim)
            return unavailable(error)
        return pause

    async def _stopped(self, run: Run, error: BaseException) -> BaseException:
        """The handler ended without an outcome: what that leaves in the ledger, and what the caller is told."""
        assert run.ledger is not None
        if is_refusal(error) and not run.marked:
            run.committed = False
        transition = _left(run, error)
        try:
            await transition
            record = await run.ledger.get(run.claim.id) if isinstance(error, Undecided) else None
        except LedgerDown as down:
            logger.error("%s: the ledger could not be told how the run ended: %s", run.claim.id, down)
            record = None
            if not run.committed:
                self._chores.unclaim(run.ledger, run.claim)
        if isinstance(error, Undecided):
            return unknown(run.claim.id, record)
        return told(error, run)

    # --- with an outcome ---------------------------------------------------------------------------------------------

    async def _completed(self, run: Run, outcome: Outcome) -> Ended:
        assert run.ledger is not None and run.token is not None
        terms = run.method.terms
        kept = stored(outcome, terms.max_stored_result)
        try:
            if await run.ledger.complete(run.token, kept, terms.retention):
                return outcome, False
            return await _superseded(run, outcome)
        except LedgerDown as error:
            logger.error("%s is done but not recorded yet: %s", run.claim.id, error)
            run.context.recorded = False
            self._record_late(run, kept)
        except asyncio.CancelledError:
            self._record_late(run, kept)
            if run.ended is None or self._chores.closing:
                raise
            # In a task of its own, and not by us: the handler's own timeout came in its last moment. It has an outcome.
        return outcome, False

    def _record_late(self, run: Run, kept: Outcome) -> None:
        ledger, token, retention = run.ledger, run.token, run.method.terms.retention
        assert ledger is not None and token is not None
        self._chores.persist(lambda: ledger.complete(token, kept, retention))


def _left(run: Run, error: BaseException) -> Awaitable[bool]:
    """The transition of a record whose run has no outcome."""
    assert run.ledger is not None and run.token is not None
    if not run.committed:
        return give_back(run.ledger, run.token, run.attempt)
    if run.claim.on_crash == "unknown" or isinstance(error, Undecided):
        return run.ledger.abandon(run.token)
    return run.ledger.lapse(run.token)


async def _superseded(run: Run, outcome: Outcome) -> Ended:
    """Another holder has the record: its outcome counts, and where it has none, ours is the truth about this run."""
    assert run.ledger is not None
    logger.warning("lost lease: %s was taken over while it ran", run.claim.id)
    record = await run.ledger.get(run.claim.id)
    if record is not None and record.state is State.DONE:
        return recorded(record), True
    return outcome, False
