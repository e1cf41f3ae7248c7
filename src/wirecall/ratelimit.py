"""Middleware for every app: `RateLimit` refuses callers that exceed their rate of calls.

    app = App("shop", middleware=[RateLimit(100, per=60, burst=20, cost={"search": 5})])

A limit is a rate and a burst (GCRA, the generic cell rate algorithm). Each caller has, for each
method, the time at which everything that it has spent is free again. A call advances this time by
its cost, and is refused if that would exceed the burst. So one number per caller and method is
enough, and calls are spread evenly beyond the burst.
"""

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from wirecall.errors import Busy, UsageError
from wirecall.ledger.base import LedgerDown, check_url, without_password
from wirecall.ledger.memory import MemoryLedger
from wirecall.logs import logger
from wirecall.options import checks_options
from wirecall.server.context import Context, Next

if TYPE_CHECKING:
    from wirecall.ledger.base import Ledger

# The table drops callers that have spent nothing when it has doubled in size since the last time.
LEAST = 1024

# The schemes of ledgers that a `RateLimit` can count in.
COUNTING = ("memory", "redis", "rediss", "valkey")

# Seconds; the sum of many small times is not exact.
ROUNDING = 1e-6


@runtime_checkable
class Shared(Protocol):
    """A store in which several processes spend from one limit: the ledger in Redis."""

    async def spend(self, name: str, cost: float, burst: float) -> float: ...


class RateLimit:
    """Admits `calls` calls per `per` seconds of each caller to each method, `burst` at once.

    `cost` is the number of calls that a call counts as: by method (1 for the others), or a function
    of the context. A cost above the burst counts as the burst. `key` is a function of the context
    that names the limited entity, by default the caller and the method: `key=lambda ctx:
    ctx.caller` gives each caller one limit for all methods.

    Each process counts separately. With `ledger=app.ledger` all processes count together, in the
    ledger's Redis; while Redis is unavailable, each counts separately. With a ledger in memory
    there is one process, which counts alone. An app with another ledger does not start. `clock` is
    for tests.

    >>> app = App("shop", middleware=[RateLimit(100, per=60)])
    """

    @checks_options
    def __init__(
        self,
        calls: float,
        *,
        per: float = 1.0,
        burst: float | None = None,
        cost: Mapping[str, float] | Callable[[Context], float] | None = None,
        key: Callable[[Context], str] | None = None,
        ledger: "Callable[[], Awaitable[Ledger]] | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        costs = {}
        if isinstance(cost, Mapping):
            costs = {f"cost of {method}": value for method, value in cost.items()}
        _check_numbers({"calls": calls, "per": per, "burst": burst, **costs})
        _check_functions({"key": key, "ledger": ledger, "cost": cost})
        # The seconds that a call costs.
        self._interval = per / calls
        self._burst = self._interval * (max(calls, 1) if burst is None else burst)
        self._cost = cost
        self._key = key
        self._ledger = ledger
        self._clock = clock
        # By key, the time when everything spent is free again.
        self._free: dict[str, float] = {}
        # The size from which the table drops callers that have spent nothing.
        self._room = LEAST
        # Whether the shared ledger is unavailable.
        self._is_away = False

    def check(self) -> None:
        """Refuse a ledger that does not count calls. An app calls this before it serves."""
        # `app.ledger` is a method, and its app knows the URL. A user's function shows its ledger
        # only later.
        url = getattr(getattr(self._ledger, "__self__", None), "ledger_url", None)
        if isinstance(url, str) and check_url(url) not in COUNTING:
            raise _cannot_count(f"the ledger is {without_password(url)}")

    async def __call__(self, context: Context, call_next: Next) -> Any:
        count = 1.0
        if isinstance(self._cost, Mapping):
            count = self._cost.get(context.method, 1.0)
        elif self._cost is not None:
            count = self._cost(context)
        seconds = max(0.0, min(count * self._interval, self._burst))
        # A NUL separates the names: callers and methods do not contain one.
        key = f"{context.caller}\0{context.method}" if self._key is None else self._key(context)
        if self._ledger is None:
            wait = self._spend(key, seconds)
        else:
            wait = await self._spend_together(key, seconds)
        if wait > 0:
            raise Busy(
                "too many calls in a short time",
                ran="no",
                retry_after_ms=math.ceil((wait - ROUNDING) * 1000),
            )
        return await call_next(context)

    def _spend(self, key: str, seconds: float) -> float:
        """Spend, and return 0; or return the seconds until the caller may retry."""
        now = self._clock()
        free = max(self._free.get(key, now), now) + seconds
        wait = free - now - self._burst
        if wait > ROUNDING:
            return wait
        self._free[key] = free
        if len(self._free) > self._room:
            self._free = {name: at for name, at in self._free.items() if at > now}
            self._room = max(LEAST, 2 * len(self._free))
        return 0.0

    async def _spend_together(self, key: str, seconds: float) -> float:
        assert self._ledger is not None
        try:
            ledger = await self._ledger()
            if isinstance(ledger, MemoryLedger):  # no other process has it
                return self._spend(key, seconds)
            if not isinstance(ledger, Shared):
                raise _cannot_count(f"this one is a {type(ledger).__name__}")
            wait = await ledger.spend(key, seconds, self._burst)
        except LedgerDown as error:
            if not self._is_away:
                logger.warning("the rate limit counts in this process alone: %s", error)
            self._is_away = True
            return self._spend(key, seconds)
        self._is_away = False
        return wait


def _check_numbers(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if value is None or _is_positive(value):
            continue
        why = ""
        if name == "per":
            why = "per is a number of seconds"
        raise UsageError(
            f"RateLimit: {name} must be a number above 0, got {value!r}.",
            why,
            "RateLimit(100, per=60)",
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _check_functions(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if value is not None and not callable(value) and not isinstance(value, Mapping):
            raise UsageError(f"RateLimit: {name} must be a function, got {type(value).__name__}.")


def _cannot_count(why: str) -> UsageError:
    return UsageError(
        "RateLimit(ledger=...) needs a ledger in Redis.",
        f"{why}, and that does not count calls",
        'use ledger="redis://..." for the app, or drop ledger= from RateLimit:'
        " then each process counts for itself",
    )
