"""A stream of server-sent events, taken apart as it arrives.

The rules are those of "Interpreting an event stream" in the HTML standard:

1. UTF-8, a byte order mark in front is skipped, broken bytes are replaced. A line ends with CR LF, with LF or with CR.
2. A line that begins with a colon is a comment. `data` lines of an event are joined by LF; an empty line ends the event.
3. An event without `data` is not an event; but its `id` counts for coming back, and so does its `retry`. (MCP 2025-11-25
   opens a stream so.) An `id` with a control character in it is ignored, and a `retry` that is not a number.
4. An event that no empty line has ended when the stream ends was cut off, and is dropped.

The limit is ours: an event that grows beyond it ends the stream.
"""

import re

from msgspec import Struct

from wirecall.errors import BadAnswer

MAX_BYTES = 10 << 20
LONGEST_WAIT = 1e9  # seconds; a longer wish of a server is cut to this, which every event loop can count

# What a header cannot carry back: control characters, and bytes that were not UTF-8. An id goes back as Last-Event-ID.
UNFIT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class Event(Struct, frozen=True):
    """An event: its name ("message" if it has none), its data, and the id to come back with after it."""

    name: str
    data: str
    id: str


class Parser:
    """Bytes in, events out. `last_id` is where to go on after a break, `retry` the seconds to wait before."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.last_id = ""
        self.retry: float | None = None
        self._max_bytes = max_bytes
        self.restart()

    def restart(self) -> None:
        """Begin another stream: the place and the pause stay, half an event does not."""
        self._rest = bytearray()  # of a line that is not complete
        self._seen = 0  # how much of the rest is known to hold no end of a line
        self._is_first = True
        self._after_cr = False
        # Of the event that is not complete:
        self._name = ""
        self._id: str | None = None
        self._data: list[str] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that this chunk completes."""
        # 1. The complete lines. A CR ends its line at once, because what follows may be long in coming; an LF after it is
        #    the second half of that end.
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        rest = self._rest
        rest += chunk
        cut = max(rest.rfind(b"\n", self._seen), rest.rfind(b"\r", self._seen)) + 1
        whole = bytes(rest[:cut])
        del rest[:cut]
        self._seen = len(rest)
        self._after_cr = self._after_cr or (whole[-1:] == b"\r" and not rest)
        lines = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n")[:-1].split(b"\n") if cut else []
        # 2. Their fields; an empty line ends an event.
        events: list[Event] = []
        for line in lines:
            if self._is_first:
                self._is_first = False
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line:
                if self._id is not None:
                    self.last_id = self._id
                if self._data:
                    events.append(Event(self._name or "message", "\n".join(self._data), self.last_id))
                self._name, self._id, self._data, self._size = "", None, [], 0
                continue
            field, _, raw = line.partition(b":")
            value = raw.removeprefix(b" ").decode("utf-8", "replace")
            if field == b"data":
                self._data.append(value)
                self._size += len(value) + 1
            elif field == b"event":
                self._name = value
            elif field == b"id" and not UNFIT.search(value):
                self._id = value
            elif field == b"retry" and value.isascii() and value.isdigit():
                self.retry = min(float(value) / 1000, LONGEST_WAIT)
            if self._size > self._max_bytes:
                break
        # 3. The limit.
        if len(rest) + self._size > self._max_bytes:
            raise BadAnswer(f"an event of more than {self._max_bytes} bytes")
        return events
