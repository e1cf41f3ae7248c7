"""The figures of a load test, without a clock, an event loop or a server.

`Latencies` counts durations in narrow buckets, so that memory does not grow with the number of
calls. `arrivals` says when each call is due. `Check` is a threshold such as `p99>20ms`.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct

# Buckets for each doubling of a duration: a bucket is at most 0.8 % wide.
FINENESS = 128
# Durations below this count as this, in seconds.
SHORTEST = 1e-9
PERCENTILES = ("p50", "p95", "p99", "p99.9")
BAR = 40

Arrivals = Literal["even", "random"]


# --- latencies ------------------------------------------------------------------------------------


def _bucket(seconds: float) -> int:
    fraction, exponent = math.frexp(max(seconds, SHORTEST))
    return exponent * FINENESS + int((fraction - 0.5) * 2 * FINENESS)


def _upper(bucket: int) -> float:
    """Return the upper end of a bucket, in seconds."""
    exponent, part = divmod(bucket, FINENESS)
    return math.ldexp(0.5 + (part + 1) / (2 * FINENESS), exponent)


class Row(Struct, frozen=True):
    """A row of the printed histogram; `start` and `end` are in milliseconds."""

    start: float
    end: float
    count: int


class Latencies:
    """Durations in seconds, counted."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.max = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        """Count `count` calls that took so many seconds."""
        self.count += count
        self.total += seconds * count
        self.max = max(self.max, seconds)
        self._buckets[_bucket(seconds)] += count

    def add_unsent(self, oldest: float, count: int) -> None:
        """Count calls that were due and never sent, evenly aged from `oldest` seconds down to 0."""
        parts = min(count, 100)
        for part in range(parts):
            share = count * (part + 1) // parts - count * part // parts
            self.add(oldest * (part + 0.5) / parts, share)

    def percentile(self, percent: float) -> float:
        """Return the seconds within which so many percent of the calls were over."""
        wanted = max(math.ceil(self.count * percent / 100), 1)
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return min(_upper(bucket), self.max)
        return 0.0

    def named(self) -> dict[str, float]:
        """Return the percentiles, the maximum and the mean in milliseconds, by name."""
        found = {name: self.percentile(float(name[1:])) for name in PERCENTILES}
        found["max"] = self.max
        found["mean"] = self.total / max(self.count, 1)
        return {name: round(seconds * 1000, 4) for name, seconds in found.items()}

    def rows(self) -> list[Row]:
        """Return the histogram between the ends 1, 2, 5, 10, ..., with the empty rows in between."""
        if not self.count:
            return []
        counts = Counter(dict.fromkeys(self._steps(), 0))
        for bucket, count in self._buckets.items():
            counts[_step(_upper(bucket))] += count
        return [
            Row(_end(step - 1) * 1000, _end(step) * 1000, counts[step]) for step in sorted(counts)
        ]

    def _steps(self) -> range:
        steps = [_step(_upper(bucket)) for bucket in self._buckets]
        return range(min(steps), max(steps) + 1)


def _end(step: int) -> float:
    """Return the end of a row in seconds: 1, 2 or 5 times a power of ten."""
    decade, part = divmod(step, 3)
    return float(f"{(1, 2, 5)[part]}e{decade}")


def _step(seconds: float) -> int:
    """Return the first row whose end is not below so many seconds."""
    step = 3 * math.floor(math.log10(seconds)) - 1
    while _end(step) < seconds:
        step += 1
    return step


def bars(rows: list[Row], width: int = BAR) -> list[tuple[str, str, str, str]]:
    """Return the histogram as text: range, bar, count, share."""
    most = max((row.count for row in rows), default=0)
    total = sum(row.count for row in rows)
    lines = []
    for row in rows:
        # A row with calls has at least one sign.
        length = math.ceil(row.count * width / most) if most else 0
        share = f"{100 * row.count / max(total, 1):.1f} %"
        name = f"{milliseconds(row.start)} - {milliseconds(row.end)}"
        lines.append((name, "#" * length, f"{row.count:,}", share))
    return lines


def milliseconds(number: float) -> str:
    """Return a time in milliseconds for people, with three digits that count and its unit."""
    for limit, factor, unit in ((1, 1000, "us"), (1000, 1, "ms"), (math.inf, 0.001, "s")):
        if number < limit:
            shown = number * factor
            digits = 3 - len(str(int(shown)))
            return f"{shown:.{max(digits, 0)}f}".removesuffix(".00").removesuffix(".0") + f" {unit}"
    return "-"


# --- when calls are due ---------------------------------------------------------------------------


def arrivals(count: int, seconds: float, kind: Arrivals = "even", seed: int = 0) -> Iterator[float]:
    """Yield when each of `count` calls is due, in seconds from the start, all before `seconds`.

    "even" spaces them equally. "random" makes them independent of each other, as the calls of many
    users are: a Poisson process that has exactly `count` arrivals. One seed gives one schedule.
    """
    if kind == "even":
        for number in range(count):
            yield number * seconds / count
        return
    chance = random.Random(seed)
    past = 0.0
    for left in range(count, 0, -1):
        # The least of `left` times that are spread over the rest (Devroye 1986, section V.3).
        past += (1.0 - past) * (1.0 - (1.0 - chance.random()) ** (1.0 / left))
        yield min(past * seconds, math.nextafter(seconds, 0.0))


# --- thresholds -----------------------------------------------------------------------------------

_TIMES = (*PERCENTILES, "max", "mean")
_COUNTS = ("errors", "late", "unsent", "differ")
NAMES = (*_TIMES, *_COUNTS, "rate", "ratio")
# The units of a time, in milliseconds.
_UNITS = {"us": 0.001, "ms": 1.0, "s": 1000.0}
_CHECK = re.compile(r"\s*([\w.]+)\s*(>=|<=|>|<)\s*(\d+(?:\.\d+)?)\s*(us|ms|s|%|)\s*", re.ASCII)


class NotACheck(ValueError):
    """A threshold that cannot be read: what is wrong with it, and how to write it."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix


class Check(Struct, frozen=True):
    """A threshold: the run is bad if it holds. Times are in milliseconds."""

    text: str
    name: str
    sign: str
    value: float
    # The value is a percentage of all calls.
    is_share: bool = False

    @classmethod
    def read(cls, text: str) -> "Check":
        """Return the threshold in a string, or raise `NotACheck`."""
        match = _CHECK.fullmatch(text)
        if match is None:
            why = f"expected NAME, one of > >= < <=, and a number, as in errors>0; got {text!r}"
            raise NotACheck(why, "p99>20ms")
        name, sign, number, unit = match.groups()
        value = float(number)
        if name not in NAMES:
            why = f"expected one of {', '.join(NAMES)}, got {name!r}"
            raise NotACheck(why, f"p99{sign}{number}{unit}")
        if name in _TIMES:
            if unit not in _UNITS:
                why = f"{name} is a time, expected a number with us, ms or s, got {number}{unit}"
                raise NotACheck(why, f"{name}{sign}{number}ms")
            return cls(text, name, sign, value * _UNITS[unit])
        if unit and not (unit == "%" and name in _COUNTS):
            why = f"{name} is not a time, expected a number, got {number}{unit}"
            raise NotACheck(why, f"{name}{sign}{number}")
        return cls(text, name, sign, value, unit == "%")

    def holds(self, figures: Mapping[str, float], calls: int) -> bool:
        """Return whether the threshold is passed, by the figures of a run of so many calls."""
        found = figures[self.name]
        if self.is_share:
            found = 100 * found / max(calls, 1)
        return {
            ">": found > self.value,
            ">=": found >= self.value,
            "<": found < self.value,
            "<=": found <= self.value,
        }[self.sign]
