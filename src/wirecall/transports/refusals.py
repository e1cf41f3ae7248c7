"""The log of requests that are refused before a call begins.

It limits the lines, so that no client can fill the log.
"""

import asyncio

from wirecall.logs import logger, outside
from wirecall.transports.request import HttpError, HttpRequest

# Statuses that point to a wrong configuration or an attack, and that no call logs.
REPORTED = frozenset({401, 403, 413, 415})
# Log lines per status and period. Further refusals are only counted.
BURST = 10
# Seconds of a period.
PERIOD = 60.0


class Refusals:
    """Logs requests refused before a call began."""

    def __init__(self) -> None:
        # Refusals of the current period, by status.
        self._counts: dict[int, int] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def note(self, request: HttpRequest, refusal: HttpError) -> None:
        """Log one refusal, or count it."""
        status = refusal.status
        if status not in self._counts:
            self._counts[status] = 0
            loop = asyncio.get_running_loop()
            self._timers[status] = loop.call_later(
                PERIOD, self._end_period, status, context=outside()
            )
        self._counts[status] += 1
        if self._counts[status] > BURST:
            return
        facts = {
            "outcome": "refused",
            "status": status,
            "reason": request.without_secrets(refusal.message),
            "client": request.client,
            "caller": request.caller or None,
        }
        words = "%(http)s %(path)s refused with %(status)d: %(reason)s"
        shown = {**facts, "http": request.method[:20], "path": request.path[:100]}
        logger.warning(words, shown, extra=facts)

    def _end_period(self, status: int) -> None:
        """Report the refusals that were only counted."""
        self._timers.pop(status).cancel()
        more = self._counts.pop(status) - BURST
        if more > 0:
            facts = {"outcome": "refused", "status": status, "count": more}
            words = "%(count)d more requests were refused with %(status)d within %(period)g s"
            logger.warning(words, {**facts, "period": PERIOD}, extra=facts)

    def close(self) -> None:
        """End the periods now."""
        for status in list(self._counts):
            self._end_period(status)
