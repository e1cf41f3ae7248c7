"""The last calls of one process, and the numbers about all of them.

The dispatcher adds tuples and lists and does nothing else. `Totals` reads them a few times a second and
counts them, so the numbers are exact as long as fewer calls end between two readings than the ring
holds; it counts the others as missed.
"""

from bisect import bisect_left
from collections import deque
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from wirecall.protocol.messages import Invalid, Message
from wirecall.server.call import Mark
from wirecall.server.tapped import More, RawRow, RowId, row_id

# Rows.
SIZE = 4096

# The row of a command, whose facts would take three times the memory as objects: number, mark,
# method, id and `Facts`. The mark is shared, and may still change.
PackedRow: TypeAlias = tuple[int, Mark, str, RowId, bytes]
# ended, code, position, more
Facts: TypeAlias = tuple[float, int | None, int | None, More]

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Facts).decode

# Bytes of the messages whose plain queries wait for a reader. They hold the params too, which no
# reader gets.
HELD = 1 << 20

# A batch of plain queries: the number of its first row, its mark, and its messages.
Bundle: TypeAlias = tuple[int, Mark, list[Message | Invalid]]

# The upper bounds of the buckets of durations, in seconds: each is twice the one before it.
BOUNDS: tuple[float, ...] = tuple(0.0001 * 2**step for step in range(20))


class Ring:
    """The last rows of this process, by number: those of plain queries in bundles."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._rows: deque[RawRow | PackedRow] = deque(maxlen=size)
        self._bundles: list[Bundle] = []
        # Their rows, and the bytes of their messages.
        self._bundled = 0
        self._held = 0
        # The number of the newest row. Numbers count from 1.
        self.last = 0

    def note(
        self,
        ended: float,
        mark: Mark,
        name: str,
        id: RowId,
        code: int | None,
        position: int | None,
        more: More | None,
    ) -> int:
        """Add a row, and return its number."""
        number = self.last = self.last + 1
        self._rows.append((number, ended, mark, name, id, code, position, more))
        return number

    def note_packed(
        self,
        ended: float,
        mark: Mark,
        name: str,
        id: RowId,
        code: int | None,
        position: int | None,
        more: More,
    ) -> int:
        """Add the row of a call that took all the steps, and return its number.

        Packing takes less than a microsecond, and such a call twenty or more.
        """
        number = self.last = self.last + 1
        self._rows.append((number, mark, name, id, _pack((ended, code, position, more))))
        return number

    def note_bundle(self, mark: Mark, messages: list[Message | Invalid]) -> None:
        """Keep a batch of plain queries until the next reading makes rows of it.

        If too much waits for that, its rows only have numbers.
        """
        size = mark.size
        if mark.noted is not None:
            size -= len(mark.noted)
        if self._bundled < self._size and self._held < HELD:
            self._bundles.append((self.last + 1, mark, messages))
            self._bundled += size
            self._held += mark.bytes
        self.last += size

    def _make_rows(self) -> None:
        """Make rows of the batches that were kept, and forget their messages."""
        if not self._bundles:
            return
        bundles = self._bundles
        self._bundles = []
        self._bundled = 0
        self._held = 0
        made: list[RawRow | PackedRow] = []
        for bundle in bundles:
            made.extend(_rows_of(bundle))
        first = bundles[0][0]
        while self._rows and self._rows[-1][0] > first:
            made.append(self._rows.pop())
        made.sort(key=itemgetter(0))
        self._rows.extend(made)

    def since(self, number: int, most: int = SIZE) -> list[RawRow]:
        """Return the rows after a number, the oldest first; the newest if there are too many."""
        self._make_rows()
        found: list[RawRow] = []
        for row in reversed(self._rows):
            if row[0] <= number or len(found) == most:
                break
            if len(row) == 5:
                row = _unpacked(row)
            found.append(row)
        found.reverse()
        return found

    def find(self, number: int) -> RawRow | None:
        """Return one row, if it is still there."""
        for row in self.since(number - 1):
            if row[0] == number:
                return row
        return None

    def batch(self, number: int) -> list[RawRow]:
        """Return the rows of one batch that are still there."""
        return [row for row in self.since(0) if row[2].batch == number]


def _unpacked(row: PackedRow) -> RawRow:
    number, mark, name, id, facts = row
    ended, code, position, more = _unpack(facts)
    return (number, ended, mark, name, id, code, position, more)


def _rows_of(bundle: Bundle) -> list[RawRow]:
    """Return the rows of a bundle. They share the time of their batch."""
    number, mark, messages = bundle
    noted = mark.noted or ()
    share = (mark.ended - mark.begun) / mark.size
    ended = mark.begun
    rows: list[RawRow] = []
    for position, message in enumerate(messages):
        if position in noted or isinstance(message, Invalid):
            continue
        id: Any = message.id
        if type(id) is not int:
            id = row_id(id)
        ended += share
        rows.append((number, ended, mark, message.method, id, None, position, None))
        number += 1
    return rows


class MethodTotals(Struct):
    """The numbers of one method since its process began."""

    kind: str | None = None
    calls: int = 0
    replays: int = 0
    seconds: float = 0.0
    undelivered: int = 0
    # By code; the code 0 stands for a call that was cancelled.
    errors: dict[int, int] = msgspec.field(default_factory=dict)
    # By bucket of `BOUNDS`; the last one has no bound.
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS) + 1))


# Methods that have separate numbers. Callers choose the names of unknown methods, which
# therefore share one entry.
MAX_METHODS = 500
OTHER = "(other)"


class Totals:
    """The numbers of every method, counted from a ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.methods: dict[str, MethodTotals] = {}
        # The number of the last row that was counted.
        self.seen = 0
        # Rows that were overwritten before they were counted.
        self.missed = 0
        # The end of the last row that was counted.
        self._previous = 0.0

    def count(self) -> None:
        """Count the rows that came since the last time."""
        rows = self._ring.since(self.seen)
        last = self._ring.last
        self.missed += last - self.seen - len(rows)
        self.seen = last
        previous = self._previous
        # The durations of plain queries that succeeded, by method.
        plain: dict[str, list[float]] = {}
        for row in rows:
            _, ended, mark, name, _, code, _, more = row
            # The start of a single plain query, without a call: most rows are of this kind.
            start = mark.begun
            if more is not None or mark.batch:
                start = start_of(row, previous)
            previous = ended
            if more is not None:
                self._add(name, code, more, ended - max(start, mark.begun))
            elif name in plain:
                plain[name].append(ended - start)
            else:
                plain[name] = [ended - start]
        self._previous = previous
        for name, durations in plain.items():
            found = self._of(name)
            found.kind = "query"
            found.calls += len(durations)
            found.seconds += sum(durations)
            for seconds in durations:
                found.buckets[bisect_left(BOUNDS, seconds)] += 1

    def _of(self, name: str) -> MethodTotals:
        found = self.methods.get(name)
        if found is None:
            if len(self.methods) >= MAX_METHODS:
                name = OTHER
            found = self.methods.setdefault(name, MethodTotals())
        return found

    def _add(self, name: str, code: int | None, more: More, seconds: float) -> None:
        found = self._of(OTHER if more.kind is None else name)
        found.kind = more.kind
        if more.outcome == "undelivered":
            # A second row about a call that was counted.
            found.undelivered += 1
            return
        found.replays += more.replayed
        if more.outcome == "cancelled":
            code = 0
        found.calls += 1
        if code is not None:
            found.errors[code] = found.errors.get(code, 0) + 1
        found.seconds += seconds
        found.buckets[bisect_left(BOUNDS, seconds)] += 1


def start_of(row: RawRow, previous: float) -> float:
    """Return when the call of a row began; `previous` is the end of the row before it.

    The row of a plain query that did not wait has no start. A process makes one call at a time, so
    it began when the call before it in its batch ended, or with its message.
    """
    _, ended, mark, _, _, _, _, more = row
    if more is not None and more.started:
        return more.started
    if mark.batch and mark.begun < previous <= ended:
        return previous
    return mark.begun


def quantile(buckets: list[int], part: float) -> float:
    """Return an upper estimate of a quantile in milliseconds, within its bucket; 0 without calls."""
    wanted = sum(buckets) * part
    if not wanted:
        return 0.0
    before = 0
    for position, number in enumerate(buckets):
        if before + number >= wanted:
            if position == len(BOUNDS):
                return BOUNDS[-1] * 1000
            low = BOUNDS[position - 1] if position else 0.0
            inside = (wanted - before) / number
            return (low + (BOUNDS[position] - low) * inside) * 1000
        before += number
    return BOUNDS[-1] * 1000
