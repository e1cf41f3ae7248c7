"""The last 15 minutes of a server, for small charts and rates."""

import time
from collections import deque
from itertools import pairwise

from msgspec import Struct

from wirecall.console.numbers import sum_of
from wirecall.console.ring import BOUNDS, MethodTotals, quantile
from wirecall.protocol.messages import Json, JsonObject

# Seconds of a step of the small charts, and their number.
STEP = 15
STEPS = 60
# Seconds over which the rates are measured.
WINDOW = 10


class Snapshot(Struct):
    """The sums over all workers at one moment."""

    at: float
    calls: int
    errors: int
    saved: int
    buckets: list[int]


class History:
    """The sums at every second, the oldest first."""

    def __init__(self) -> None:
        self._snapshots: deque[Snapshot] = deque(maxlen=STEP * STEPS + WINDOW)

    def add(self, methods: dict[str, MethodTotals]) -> None:
        """Add the sums of now."""
        self._snapshots.append(
            Snapshot(
                time.time(),
                sum(each.calls for each in methods.values()),
                sum(sum(each.errors.values()) for each in methods.values()),
                sum(each.replays for each in methods.values()),
                sum_of([each.buckets for each in methods.values()]),
            )
        )

    @property
    def newest(self) -> Snapshot:
        return self._snapshots[-1]

    def rates(self) -> JsonObject:
        """Return the rates of the last seconds."""
        newest = self.newest
        before = next(
            (each for each in reversed(self._snapshots) if each.at <= newest.at - WINDOW),
            self._snapshots[0],
        )
        seconds = max(newest.at - before.at, 1.0)
        buckets = [new - old for new, old in zip(newest.buckets, before.buckets, strict=True)]
        return {
            "calls_per_s": (newest.calls - before.calls) / seconds,
            "errors_per_s": (newest.errors - before.errors) / seconds,
            "p95_ms": quantile(buckets, 0.95),
            "saved": newest.saved,
        }

    def sparks(self) -> JsonObject:
        """Return the last 15 minutes in steps, the oldest first."""
        now = time.time()
        edges = [now - STEP * each for each in range(STEPS, -1, -1)]
        at_edges: list[Snapshot | None] = []
        snapshots = iter(self._snapshots)
        last: Snapshot | None = None
        following = next(snapshots, None)
        for edge in edges:
            while following is not None and following.at <= edge:
                last = following
                following = next(snapshots, None)
            at_edges.append(last)
        if self._snapshots:
            at_edges[-1] = self._snapshots[-1]
        sparks: dict[str, list[Json]] = {"calls": [], "errors": [], "p95_ms": [], "saved": []}
        empty = Snapshot(0.0, 0, 0, 0, [0] * (len(BOUNDS) + 1))
        for old, new in pairwise(at_edges):
            start = old or empty
            end = new or start
            buckets = [high - low for high, low in zip(end.buckets, start.buckets, strict=True)]
            sparks["calls"].append(end.calls - start.calls)
            sparks["errors"].append(end.errors - start.errors)
            sparks["p95_ms"].append(quantile(buckets, 0.95))
            sparks["saved"].append(end.saved - start.saved)
        return {"step_s": STEP, **sparks}
