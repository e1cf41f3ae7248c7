"""The calls that are kept of all workers, by the numbers that they got here.

A gap in these numbers means that rows were lost.
"""

import os
import time
from collections import deque

from wirecall.console.filter import Filter, read_filter
from wirecall.console.ring import SIZE
from wirecall.console.rows import Seen
from wirecall.console.source import FeedEvent, NotFound
from wirecall.protocol.messages import Json, JsonObject

# Rows that are kept for each worker, and those of one event of a feed.
KEPT = SIZE
SENT = 200
# Repetitions of a call that its page links to.
REPLAYS = 20
# The members by which calls with the same record are found.
SAME = ("caller", "method", "key")


class Calls:
    """The last calls, the oldest first."""

    def __init__(self) -> None:
        self.rows: deque[Seen] = deque(maxlen=KEPT)
        # The number of the newest row, and of those that were lost.
        self.last = 0
        self.lost = 0
        self._epoch = os.urandom(3).hex()

    @property
    def place(self) -> str:
        """The place after the newest row, from which a feed can continue."""
        return f"{self._epoch}-{self.last}"

    def limit(self, workers: int) -> None:
        """Keep the rows of a number of workers."""
        wanted = KEPT * max(1, workers)
        if self.rows.maxlen != wanted:
            self.rows = deque(self.rows, maxlen=wanted)

    def add(self, found: list[Seen], lost: int) -> None:
        """Add rows, and give them their numbers."""
        self.last += lost
        self.lost += lost
        for seen in found:
            self.last += 1
            seen.number = self.last
        self.rows.extend(found)

    def grey(self, worker: str) -> None:
        """Mark the rows of a worker that has ended."""
        for seen in self.rows:
            if seen.worker == worker:
                seen.grey()

    def of(self, record: JsonObject, most: int) -> list[JsonObject]:
        """Return the rows of a record, the newest first."""
        return [
            seen.row
            for seen in reversed(self.rows)
            if all(seen.row[name] == record[name] for name in SAME)
        ][:most]

    def newest_of(self, method: str) -> Json:
        """Return the id of the newest call of a method."""
        return next(
            (seen.row["id"] for seen in reversed(self.rows) if seen.row["method"] == method), None
        )

    def page(self, filter: str = "", *, limit: int = 200, before: str | None = None) -> JsonObject:
        """Return the newest calls that fit a filter."""
        wanted = read_filter(filter)
        now = time.time()
        rows: list[JsonObject] = []
        hidden = 0
        more: Json = None
        is_after = before is None
        for seen in reversed(self.rows):
            if not is_after:
                is_after = seen.row["id"] == before
                continue
            if not wanted.fits(seen.row, now):
                hidden += 1
                continue
            if len(rows) == max(1, min(limit, 1000)):
                more = rows[-1]["id"]
                break
            rows.append(seen.row)
        return {
            "rows": rows,
            "more": more,
            "hidden": hidden,
            "total": len(self.rows),
            "lost": self.lost,
            "filter": filter,
        }

    def find(self, id: str) -> Seen:
        for seen in reversed(self.rows):
            if seen.row["id"] == id:
                return seen
        raise NotFound(f"call {id[:100]}", "only the last calls are kept")

    def errors(self) -> list[JsonObject]:
        """Return the errors among the rows, by method and code, the most frequent first."""
        groups: dict[tuple[Json, Json], JsonObject] = {}
        for seen in self.rows:
            row = seen.row
            if row["outcome"] != "error":
                continue
            group = groups.setdefault(
                (row["method"], row["code"]),
                {"method": row["method"], "code": row["code"], "count": 0},
            )
            group["count"] += 1
            group["last_at"] = row["at"]
            group["call"] = row["id"]
        return sorted(groups.values(), key=lambda group: -group["count"])[:20]

    def original(self, row: JsonObject) -> Json:
        """Return the call that ran, if this one got its answer and it is still here."""
        if not row["replayed"]:
            return None
        for seen in reversed(self.rows):
            other = seen.row
            is_first = not other["replayed"] and other["outcome"] != "undelivered"
            if is_first and all(other[name] == row[name] for name in SAME):
                return other["id"]
        return None

    def replays(self, row: JsonObject) -> list[Json]:
        """Return the later calls that got the answer of this one, the newest first."""
        if row["key"] is None or row["replayed"]:
            return []
        return [
            seen.row["id"]
            for seen in reversed(self.rows)
            if seen.row["replayed"] and all(seen.row[name] == row[name] for name in SAME)
        ][:REPLAYS]

    def place_of(self, after: str | None) -> tuple[int, int]:
        """Return the number after which a feed continues, and how many rows it has lost.

        -1: it is not known.
        """
        if after is None:
            return self.last, 0
        epoch, _, number = after.partition("-")
        if epoch != self._epoch or not number.isdecimal():
            return self.last, -1
        return min(int(number), self.last), 0

    def next_rows(self, wanted: Filter, place: int, lost: int) -> tuple[FeedEvent | None, int, int]:
        """Return the event with the rows after a place, and the place after it."""
        if place == self.last and not lost:
            return None, place, 0
        fresh: list[Seen] = []
        for seen in reversed(self.rows):
            if seen.number <= place:
                break
            fresh.append(seen)
        fresh.reverse()
        if lost >= 0:
            lost += self.last - place - len(fresh)
        now = time.time()
        if wanted.tests:
            fresh = [seen for seen in fresh if wanted.fits(seen.row, now)]
        step = 1
        if len(fresh) > SENT:
            step = -(-len(fresh) // SENT)
            fresh = fresh[::step]
        if not fresh and not lost:
            return None, self.last, 0
        rows = [seen.row for seen in fresh]
        data: JsonObject = {"rows": rows, "sampled": step, "lost": lost}
        return FeedEvent("rows", data, self.place), self.last, 0
