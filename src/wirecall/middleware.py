"""Middleware for every app: `RateLimit` refuses callers that send more calls in a time than they may.

    app = App("shop", middleware=[RateLimit(100, per=60, burst=20, cost={"search": 5})])

A limit is a rate and a burst (GCRA, the generic cell rate algorithm). Each caller has, for each method, the time at which
everything that it has spent is free again. A call moves this time on by its cost, and is refused if it would be further away
than the burst reaches. So one number per caller and method is enough, and calls are spread evenly beyond the burst.
"""

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from wirecall.errors import Busy, UsageError
from wirecall.ledger.base import LedgerDown
from wirecall.logs import logger
from wirecall.server.call import Context, Next

if TYPE_CHECKING:
    from wirecall.ledger.base import Ledger

# The table forgets callers that have spent nothing when it has grown to twice its size after the last time.
LEAST = 1024

ROUNDING = 1e-6  # seconds: the sum of many small times is not exact


@runtime_checkable
class Shared(Protocol):
    """A store in which several processes spend from one limit: the ledger in Redis."""

    async def spend(self, name: str, cost: float, burst: float) -> float: ...


class RateLimit:
    """Admits `calls` calls per `per` seconds of each caller to each method, and `burst` of them at once.

    `cost` says how many calls a call counts for: by method (1 for the others), or a function of the context. A cost above
    the burst counts as the burst. `key` is a function of the context that names what is limited, by default the caller and
    the method: `key=lambda ctx: ctx.caller` gives each caller one limit for all methods.

    Each process counts for itself. With `ledger=app.ledger` all processes count together, in the ledger's Redis; while that
    is away, each counts for itself. `clock` is for tests.
    """

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
        costs = cost if isinstance(cost, Mapping) else {}
        for name, value in (
            ("calls", calls),
            ("per", per),
            ("burst", burst),
            *((f"cost of {m}", c) for m, c in costs.items()),
        ):
            if value is not None and not value > 0:
                raise UsageError(f"RateLimit: {name} must be a number above 0, got {value!r}.", fix="RateLimit(100, per=60)")
        self._interval = per / calls  # seconds that a call costs
        self._burst = self._interval * (max(calls, 1) if burst is None else burst)
        self._cost = cost
        self._key = key
        self._ledger = ledger
        self._clock = clock
        self._free: dict[str, float] = {}  # by key, when nothing is spent any more
        self._room = LEAST
        self._is_away = False

    async def __call__(self, context: Context, call_next: Next) -> Any:
        cost = self._cost
        count = 1.0 if cost is None else cost.get(context.method, 1.0) if isinstance(cost, Mapping) else cost(context)
        seconds = max(0.0, min(count * self._interval, self._burst))
        # A NUL parts the names: neither a caller nor a method has one.
        key = f"{context.caller}\0{context.method}" if self._key is None else self._key(context)
        wait = self._spend(key, seconds) if self._ledger is None else await self._spend_together(key, seconds)
        if wait > 0:
            raise Busy("too many calls in a short time", ran="no", retry_after_ms=math.ceil((wait - ROUNDING) * 1000))
        return await call_next(context)

    def _spend(self, key: str, seconds: float) -> float:
        """Spend, and return 0; or return the seconds until the call may come again."""
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
            if not isinstance(ledger, Shared):
                raise UsageError(
                    "RateLimit(ledger=...) needs a ledger in Redis.",
                    "other ledgers do not count calls",
                    'use ledger="redis://...", or drop ledger= from RateLimit',
                )
            wait = await ledger.spend(key, seconds, self._burst)
        except LedgerDown as error:
            if not self._is_away:
                logger.warning("the rate limit counts in this process alone: %s", error)
            self._is_away = True
            return self._spend(key, seconds)
        self._is_away = False
        return wait
