"""The newest rows as JSON, encoded once for all that watch.

Each watcher asks for the rows after the last one that it has. Most of them ask for the same rows, a
moment apart. So the rows that came between two questions are encoded as one piece, and an answer is
made of whole pieces: its first rows may be known to the reader.
"""

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import Raw

if TYPE_CHECKING:
    from wirecall.console.ring import Ring

# Rows of the pieces that are kept. More would not fit into the memory of the ring.
KEPT = 1024


class Piece(NamedTuple):
    """Rows that follow each other."""

    # The number of its newest row, and how many it has.
    last: int
    size: int
    # Without the brackets of the array.
    data: bytes


class Pieces:
    """The newest rows of a ring, encoded."""

    def __init__(self, ring: "Ring") -> None:
        self._ring = ring
        self._kept: deque[Piece] = deque()
        self._size = 0
        # The number of the row before the first one that is kept.
        self._before = ring.last

    def after(self, number: int) -> Raw:
        """Return the rows after a number as a JSON array; some rows before it may be among them."""
        newest = self._before
        if self._kept:
            newest = self._kept[-1].last
        fresh = self._ring.since(newest)
        # The entries of a batch that still runs show their end later.
        is_settled = all(row[2].ended or not row[2].batch for row in fresh)
        if number < self._before or not is_settled:
            return Raw(msgspec.json.encode(self._ring.since(number)))
        if fresh:
            self._kept.append(Piece(fresh[-1][0], len(fresh), msgspec.json.encode(fresh)[1:-1]))
            self._size += len(fresh)
        found = [piece.data for piece in self._kept if piece.last > number]
        while self._size > KEPT:
            oldest = self._kept.popleft()
            self._size -= oldest.size
            self._before = oldest.last
        return Raw(b"[%s]" % b",".join(found))
