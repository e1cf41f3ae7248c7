"""What makes a call safe to repeat, when it is repeated, and how long nobody repeats it.

1. A call is repeated only if it may be (`Entry.safe`: it only reads, or it has an idempotency key) and if that may help
   (`may_help`): the server was not reached, the answer was lost, or the server asks to come again.
2. A key is minted once per intent, before the first attempt, and never again.
3. Between attempts the client waits a random time of up to `first` seconds, doubled each time, up to `cap` (full jitter),
   and never less than the server asked for. No attempt begins after the deadline of the call.
"""

import asyncio
import os
import time
from typing import Protocol

from msgspec import Struct

from wirecall.errors import (
    Busy,
    CallFailed,
    ConnectionLost,
    Declined,
    KeyInProgress,
    LedgerUnavailable,
    NotSent,
    RpcError,
    TimedOut,
    UsageError,
)
from wirecall.transports.sse import LONGEST_WAIT

# Answers of proxies and servers that say "not now". Any other status will be the same the next time.
_LATER = frozenset({429, 502, 503, 504})
# A bad answer is not among them: who speaks garbage once will not be better for being asked again.
_LOST = (NotSent, ConnectionLost, TimedOut, KeyInProgress, Busy, LedgerUnavailable)


DOUBLINGS = 60  # of a pause; a float has room for 1023


class Clock(Protocol):
    """The time between attempts, for tests to replace."""

    def time(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    """Seconds that pass by themselves."""

    time = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)


class Retry(Struct, frozen=True, kw_only=True):
    """How a call that may be repeated is repeated."""

    attempts: int = 8
    first: float = 0.1
    cap: float = 10.0
    silence: float | None = None  # seconds without an answer after which an attempt counts as lost; None: the whole timeout

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first <= self.cap or (self.silence is not None and self.silence <= 0):
            raise UsageError(f"{self!r} cannot be followed.", fix="attempts >= 1, 0 <= first <= cap, silence > 0")

    def pause(self, attempt: int, asked: float, chance: float) -> float:
        """Seconds between attempt number `attempt` and the next; `chance` is a random number from 0 to 1."""
        return max(asked, chance * min(self.cap, self.first * 2.0 ** min(attempt - 1, DOUBLINGS)))


def may_help(error: Exception) -> bool:
    """Whether the same call may end otherwise the next time."""
    if isinstance(error, CallFailed) and error.status is not None:
        return error.status in _LATER
    return isinstance(error, _LOST) and not isinstance(error, Declined)


def asked_pause(error: Exception) -> float:
    """Return the seconds that the server asked the client to wait."""
    if isinstance(error, CallFailed):
        return error.retry_after or 0.0
    told = error.data.get("retry_after_ms") if isinstance(error, RpcError) and isinstance(error.data, dict) else None
    if not isinstance(told, int | float) or isinstance(told, bool):
        return 0.0
    return min(max(told, 0), LONGEST_WAIT * 1000) / 1000  # the bound first: a JSON number can be too large for a float


def mint_key() -> str:
    """A UUID of version 7 (RFC 9562, section 5.7): 48 bits of Unix time in milliseconds, the version, and chance."""
    moment, chance = f"{time.time_ns() // 1_000_000:012x}", os.urandom(10).hex()
    variant = "89ab"[int(chance[3], 16) & 3]
    return f"{moment[:8]}-{moment[8:]}-7{chance[:3]}-{variant}{chance[4:7]}-{chance[7:19]}"
