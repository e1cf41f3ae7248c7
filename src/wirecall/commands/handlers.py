"""The function of a command is called: what it returns, and the errors that are its answer, become an outcome.

The rules of the file:

1. A function that cannot wait is called at once, before it is decided whether the command needs a task (`called`).
2. While the function runs, it may be interrupted; once it has returned, it may not (`handled`).
3. An outcome is encoded once; the same bytes are recorded and sent.
4. What the method's own reconcile function does not clearly know is not known (`reconciled`).
"""

import types
from functools import partial
from typing import Any

from wirecall.commands.outcome import outcome_of
from wirecall.commands.run import Call, Run, in_thread, settled
from wirecall.errors import FixedError, RpcError
from wirecall.ledger.base import Outcome
from wirecall.logs import logger
from wirecall.server.terms import CannotTell, Done, NotDone


def called(call: Call, straight: types.CodeType | None) -> tuple[Call, bool]:
    """A function that never waits is called at once: nothing can interrupt it. It may still return something to await."""
    try:
        result = call()
        if straight is not None and getattr(result, "cr_code", None) is straight:
            result = _run_through(result)
    except BaseException as error:
        return partial(_raise, error), False
    return lambda: result, hasattr(result, "__await__")


def _run_through(coroutine: "types.CoroutineType[Any, Any, Any]") -> Any:
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    raise AssertionError("it has nowhere to wait")


def _raise(error: BaseException) -> None:
    raise error


async def handled(run: Run, call: Call) -> Outcome:
    """Run the handler. Its result and its own errors are outcomes; anything else it raises is not."""
    run.interruptible = True
    try:
        result = call()
        if hasattr(result, "__await__"):
            result = await settled(result)
    except FixedError:
        raise
    except RpcError as error:
        return outcome_of("error", error, run.claim.id)
    finally:
        run.interruptible = False
    run.committed = True
    return outcome_of("result", result, run.claim.id)


class Undecided(Exception):
    """A reconcile function does not know."""


async def reconciled(run: Run) -> Outcome | None:
    """What the method's own reconcile function knows about the run of a holder that vanished."""
    if run.attempt == 1:
        return None
    run.committed = True
    verdict = await settled(_asked(run))
    if isinstance(verdict, Done):
        return outcome_of("result", verdict.result, run.claim.id)
    if isinstance(verdict, NotDone):
        run.committed = run.claim.committed
        return None
    if not isinstance(verdict, CannotTell):
        logger.error("%s: reconcile returned %r, not Done, NotDone or CannotTell", run.method.name, verdict)
    raise Undecided


def _asked(run: Run) -> Any:
    if run.method.blocking and not run.alone:
        return in_thread(partial(run.method.reconcile, run.context))
    return run.method.reconcile(run.context)
