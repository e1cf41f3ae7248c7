"""A parser for a stream of server-sent events.

The rules are those of "Interpreting an event stream" in the HTML standard:

1. UTF-8, a byte order mark in front is skipped, broken bytes are replaced. A line ends with CR LF,
   with LF or with CR.
2. A line that begins with a colon is a comment. `data` lines of an event are joined by LF; an empty
   line ends the event.
3. An event without `data` is not an event, but its `id` and its `retry` count for resuming. (MCP
   2025-11-25 opens a stream like this.) An `id` with a control character is ignored, and so is a
   `retry` that is not a number.
4. An event that no empty line has ended when the stream ends was cut off, and is dropped.

The limit is ours: an event that grows beyond it ends the stream.
"""

import re

from msgspec import Struct

from wirecall.errors import BadAnswer

MAX_BYTES = 10 << 20
# Seconds; a longer `retry` is reduced to this, which every event loop can handle.
LONGEST_WAIT = 1e9

# Control characters and bytes that were not UTF-8 do not fit a header. An id is sent back as
# Last-Event-ID.
UNFIT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class Event(Struct, frozen=True):
    """An event: its name ("message" if it has none), its data, and the id to resume after it."""

    name: str
    data: str
    id: str


class Parser:
    """Bytes in, events out.

    `last_id` is where to resume after a break, `retry` the seconds to wait first.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.last_id = ""
        self.retry: float | None = None
        self._max_bytes = max_bytes
        self.restart()

    def restart(self) -> None:
        """Begin another stream: `last_id` and `retry` are kept, half an event is not."""
        # The start of an incomplete line.
        self._rest = bytearray()
        # The bytes of the rest without a line end.
        self._seen = 0
        self._is_first = True
        self._after_cr = False
        self._forget_event()

    def _forget_event(self) -> None:
        """Begin another event."""
        self._name = ""
        self._id: str | None = None
        self._data: list[str] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that this chunk completes."""
        events: list[Event] = []
        for line in self._complete_lines(chunk):
            if not line:
                self._end_event(events)
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
        if len(self._rest) + self._size > self._max_bytes:
            raise BadAnswer(f"an event of more than {self._max_bytes} bytes")
        return events

    def _complete_lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that this chunk completes, without a byte order mark.

        A CR ends its line at once, because the next byte may take long to arrive; an LF after it is
        the second half of that line end.
        """
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        rest = self._rest
        rest += chunk
        cut = max(rest.rfind(b"\n", self._seen), rest.rfind(b"\r", self._seen)) + 1
        if not cut:
            self._seen = len(rest)
            return []
        whole = bytes(rest[:cut])
        del rest[:cut]
        self._seen = len(rest)
        if whole.endswith(b"\r") and not rest:
            self._after_cr = True
        if self._is_first:
            self._is_first = False
            whole = whole.removeprefix(b"\xef\xbb\xbf")
        return whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n")[:-1].split(b"\n")

    def _end_event(self, events: list[Event]) -> None:
        """End the incomplete event; one without data is not an event."""
        if self._id is not None:
            self.last_id = self._id
        if self._data:
            events.append(Event(self._name or "message", "\n".join(self._data), self.last_id))
        self._forget_event()
