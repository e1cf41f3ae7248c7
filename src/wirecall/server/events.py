"""Observers of calls get one `CallEnded` per call, when its work is over. The log is one, the audit trail another.

A command that goes on after its caller has left ends when its handler does, and is reported then. A command without a key
whose answer did not reach its caller is reported once more, as undelivered.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from wirecall.errors import Gone, InternalError, RpcError
from wirecall.logs import called
from wirecall.server.call import Call, CorrelationId, InputRequired

Word: TypeAlias = Literal["ok", "error", "cancelled", "input required", "undelivered"]


class CallEnded(Struct, frozen=True, kw_only=True):
    """One call that has ended, served or refused."""

    correlation_id: CorrelationId
    method: str  # as in the ledger: a tool's is tools/call:NAME
    kind: str | None = None  # None for an unknown method
    position: int | None = None  # in a batch, from 0
    caller: str = ""
    key: str | None = None
    fingerprint: bytes | None = None  # of a command whose params fit
    outcome: Word
    code: int | None = None
    replayed: bool = False
    recognised: bool = False  # the call came without a key, and repeats one whose answer was lost
    duration_ms: float = 0.0


Observer: TypeAlias = Callable[[CallEnded], None]


class Events:
    """Reports every call to the observers of an app, and to the log."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = observers
        self.observed = bool(observers)  # by more than the log

    def call_ended(self, call: Call, error: BaseException | None = None) -> None:
        """Report a call that was admitted."""
        outcome: Word = "ok"
        code = None
        if isinstance(error, InputRequired):
            outcome = "input required"
        elif isinstance(error, asyncio.CancelledError):
            outcome = "cancelled"
        elif isinstance(error, Gone):
            outcome = "undelivered"
        elif error is not None:
            outcome, code = "error", error.code if isinstance(error, RpcError) else InternalError.CODE
        ended = CallEnded(
            correlation_id=call.correlation_id,
            method=call.record,
            kind=call.method.kind.value,
            position=call.position,
            caller=call.frame.caller,
            key=call.key,
            fingerprint=call.fingerprint,
            outcome=outcome,
            code=code,
            replayed=call.replayed,
            recognised=call.recognised,
            duration_ms=(time.perf_counter() - call.started) * 1000,
        )
        if call.frame.logged:
            log(ended)
        for observer in self._observers:
            observer(ended)


def log(ended: CallEnded) -> None:
    """Write the log record of a call."""
    called(
        correlation_id=ended.correlation_id,
        method=ended.method,
        kind=ended.kind,
        position=ended.position,
        duration_ms=ended.duration_ms,
        outcome="replayed" if ended.replayed and ended.outcome != "undelivered" else ended.outcome,
        code=ended.code,
        caller=ended.caller or None,
        idempotency_key=ended.key,
    )
