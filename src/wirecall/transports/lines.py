"""A stream of bytes cut into lines.

A line ends with a newline, with or without a carriage return before it, and the last one with the stream; empty lines are
left out. A line that is too long is cut one byte beyond the limit, so that its reader sees that it is too long.
"""


class Splitter:
    """Cuts bytes into lines."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        pieces = data.split(b"\n")
        rest = pieces.pop()
        if pieces and (self._rest or self._skipping):
            pieces[0] = self._completed(pieces[0])
        lines = [line for piece in pieces if (line := self._line(piece))]
        if rest and not self._skipping:
            self._rest += rest
            if len(self._rest) > self._limit + 1:  # the last byte within the limit may be the \r of the line's end
                self._skipping = True
                lines.append(bytes(self._rest[: self._limit + 1]))
                self._rest.clear()
        return lines

    def rest(self) -> list[bytes]:
        """Return the last line, which has no newline."""
        line = self._line(self._completed(b""))
        return [line] if line else []

    def _completed(self, piece: bytes) -> bytes:
        if self._skipping:
            self._skipping = False
            return b""
        line = bytes(self._rest + piece)
        self._rest.clear()
        return line

    def _line(self, piece: bytes) -> bytes:
        line = piece.removesuffix(b"\r")
        return b"" if line.isspace() else line[: self._limit + 1]
