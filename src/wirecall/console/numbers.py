"""The numbers of workers, and their sums."""

import msgspec
from msgspec import Struct

from wirecall.console.ring import BOUNDS, MethodTotals, quantile
from wirecall.console.tap import Trip
from wirecall.protocol.messages import JsonObject


class Numbers(Struct):
    """The numbers of one worker, as it answers them."""

    worker: str
    pid: int
    since: float
    last: int = 0
    missed: int = 0
    in_flight: int = 0
    queued: int = 0
    methods: dict[str, MethodTotals] = {}
    trips: dict[str, Trip] = {}
    # The state of each server behind a gateway. None: it is not a gateway.
    upstreams: dict[str, JsonObject] | None = None


decode_numbers = msgspec.json.Decoder(Numbers).decode


def sum_of(lists: list[list[int]]) -> list[int]:
    """Return the sums of several lists of buckets."""
    total = [0] * (len(BOUNDS) + 1)
    for each in lists:
        total = [left + right for left, right in zip(total, each, strict=True)]
    return total


def sum_of_numbers(several: list[Numbers]) -> Numbers:
    """Return the numbers of several workers as one."""
    total = Numbers("", 0, 0.0, methods={}, trips={})
    for numbers in several:
        total.missed += numbers.missed
        total.in_flight += numbers.in_flight
        total.queued += numbers.queued
        for name, each in numbers.methods.items():
            found = total.methods.setdefault(name, MethodTotals(each.kind))
            found.calls += each.calls
            found.replays += each.replays
            found.seconds += each.seconds
            found.undelivered += each.undelivered
            for code, number in each.errors.items():
                found.errors[code] = found.errors.get(code, 0) + number
            found.buckets = sum_of([found.buckets, each.buckets])
        for name, trip in numbers.trips.items():
            whole = total.trips.setdefault(name, Trip())
            whole.number += trip.number
            whole.failed += trip.failed
            whole.seconds += trip.seconds
    return total


def merged(totals: list[MethodTotals]) -> MethodTotals:
    """Return the numbers of several methods as one."""
    if len(totals) == 1:
        return totals[0]
    whole = MethodTotals()
    for each in totals:
        whole.calls += each.calls
        whole.seconds += each.seconds
        whole.replays += each.replays
        for code, number in each.errors.items():
            whole.errors[code] = whole.errors.get(code, 0) + number
        whole.buckets = sum_of([whole.buckets, each.buckets])
    return whole


def figures(totals: MethodTotals) -> JsonObject:
    """Return the numbers of a method as a page shows them."""
    return {
        "calls": totals.calls,
        "errors": sum(totals.errors.values()),
        "total_ms": round(totals.seconds * 1000, 3),
        "p50_ms": quantile(totals.buckets, 0.5),
        "p95_ms": quantile(totals.buckets, 0.95),
    }
