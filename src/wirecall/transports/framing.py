"""Framing: where each message of a stream of bytes begins and ends.

A framing is a pair. `splitter` makes an object that cuts a stream into messages, and `join` returns
one message as it is sent. Both are pure: they see bytes, and no descriptors.

1. `lines`: a message is a line (`transports.lines.Splitter`).
2. `content-length`: a header comes before each message, as in the Language Server Protocol. Its
   field `Content-Length` counts the bytes of the message. The header ends with an empty line.
   `Content-Type` is allowed, and other fields are ignored.

A stream with a wrong header cannot be read further, since nothing shows where the next message
begins. `broken` says why. A message that is too long is cut one byte beyond the limit, so that its
reader sees that it is too long, and the stream continues after it.
"""

import re
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias, get_args

from msgspec import Struct

from wirecall.errors import UsageError
from wirecall.transports.lines import Splitter, join_line

FramingName: TypeAlias = Literal["lines", "content-length"]

# Bytes of a header. That of a language server has less than a hundred.
HEADER = 16 << 10
# Digits of a length. Python reads a longer number slowly, and no message is that long.
DIGITS = 15
# Bytes of a wrong header that an error quotes.
QUOTED = 60

_END = re.compile(rb"\r?\n\r?\n")
_BLANK = re.compile(rb"[\r\n]+")
# A field of a header (RFC 9110, section 5): its name is a token.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
_CHARSET = re.compile(rb"charset\s*=\s*\"?([^\s\";]+)", re.IGNORECASE)


class Split(Protocol):
    """Cuts bytes into messages."""

    # Why the stream cannot be read further. None: it can.
    broken: str | None

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that these bytes complete."""

    def rest(self) -> list[bytes]:
        """Return the messages that the end of the stream completes."""


class Framing(Struct, frozen=True):
    """One way to send messages over a stream of bytes."""

    name: FramingName
    # Makes an object that cuts a stream. It takes the largest size of a message.
    splitter: Callable[[int], Split]
    join: Callable[[bytes], bytes]


def framing_of(name: str) -> Framing:
    """Return a framing by its name; `UsageError` if there is none."""
    for framing in (LINES, CONTENT_LENGTH):
        if framing.name == name:
            return framing
    words = " or ".join(f'"{each}"' for each in get_args(FramingName))
    raise UsageError(f"{name!r} is not a framing.", "", f"use framing={words}")


def join_header(message: bytes) -> bytes:
    """Return a message with its header."""
    return b"Content-Length: %d\r\n\r\n%b" % (len(message), message)


class _WrongHeader(Exception):
    """A header that is refused. Its text says what was expected."""


class HeaderSplitter:
    """Cuts bytes into messages that have a header with `Content-Length`."""

    def __init__(self, limit: int) -> None:
        self.broken: str | None = None
        self._limit = limit
        self._rest = bytearray()
        # The size of the message whose bytes come next. None: a header comes next.
        self._size: int | None = None
        # The bytes of a message that is too long, and that are dropped.
        self._skipped = 0
        # The bytes of the header in which its end was searched.
        self._searched = 0
        # No header has come yet.
        self._is_first = True
        # The message before the header, if its characters and its bytes have different numbers.
        self._last = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that these bytes complete."""
        messages: list[bytes] = []
        if self.broken is not None:
            return messages
        self._rest += data
        try:
            while self._skip() and self._read_header() and self._read_message(messages):
                pass
        except _WrongHeader as error:
            self.broken = str(error)
            self._rest.clear()
        return messages

    def rest(self) -> list[bytes]:
        """Return nothing: a message ends where its header says. Note a stream that ends earlier."""
        if self.broken is not None or not (self._rest or self._size):
            return []
        if self._size is not None:
            self.broken = (
                f"Content-Length is {self._size}, but the stream ended after {len(self._rest)} "
                "bytes of the message; Content-Length counts the bytes of the message"
            )
        else:
            block = bytes(self._rest)
            self.broken = f"the stream ended inside a header: {_quoted(block)}{self._hint(block)}"
        self._rest.clear()
        return []

    def _skip(self) -> bool:
        """Drop the rest of a message that is too long; return whether all of it is dropped."""
        dropped = min(self._skipped, len(self._rest))
        del self._rest[:dropped]
        self._skipped -= dropped
        return not self._skipped

    def _read_header(self) -> bool:
        """Read a header, unless one is read already; return whether it is complete."""
        if self._size is not None:
            return True
        # Some programs write a newline after a message.
        if blank := _BLANK.match(self._rest):
            del self._rest[: blank.end()]
        if self._is_first:
            self._check_first()
        # The last bytes may be the first part of the end.
        found = _END.search(self._rest, max(0, self._searched - 3))
        if found is not None and found.end() <= HEADER:
            block = bytes(self._rest[: found.end()])
            del self._rest[: found.end()]
            self._searched = 0
            self._size = self._size_in(block)
            return True
        if len(self._rest) >= HEADER:
            block = bytes(self._rest[:HEADER])
            raise _WrongHeader(
                f"expected a header of at most {HEADER} bytes, got a longer one: "
                f"{_quoted(block)}{self._hint(block)}"
            )
        self._searched = len(self._rest)
        return False

    def _check_first(self) -> None:
        """Refuse a stream that begins with a message: its sender would wait for the answer."""
        first = bytes(self._rest[:1])
        if first in (b"{", b"["):
            raise _WrongHeader(
                "expected a header such as Content-Length: 52 before the first message, "
                f"got {_quoted(first)}; use the framing that the sender uses, such as lines"
            )
        self._is_first = not first

    def _read_message(self, messages: list[bytes]) -> bool:
        """Read the message after a header; return whether it is complete."""
        assert self._size is not None
        kept = min(self._size, self._limit + 1)
        if len(self._rest) < kept:
            return False
        message = bytes(self._rest[:kept])
        del self._rest[:kept]
        self._skipped = self._size - kept
        self._size = None
        self._last = b""
        if not self._skipped and not message.isascii():
            self._last = message
        messages.append(message)
        return True

    def _size_in(self, block: bytes) -> int:
        """Return the length that a header states."""
        lengths: list[bytes] = []
        for line in block.replace(b"\r\n", b"\n").split(b"\n"):
            if not line:
                continue
            field = _FIELD.fullmatch(line)
            if field is None:
                raise _WrongHeader(
                    "expected a field of a header, such as Content-Length: 52, "
                    f"got {_quoted(line)}{self._hint(block)}"
                )
            name = field[1].lower()
            if name == b"content-length":
                lengths.append(field[2])
            elif name == b"content-type":
                _check_type(field[2])
        if not lengths:
            raise _WrongHeader(
                f"expected a header with Content-Length, got {_quoted(block)}{self._hint(block)}"
            )
        if len(lengths) > 1:
            both = ", ".join(_quoted(length) for length in lengths[:2])
            raise _WrongHeader(f"expected one Content-Length, got {len(lengths)}: {both}")
        return _number(lengths[0])

    def _hint(self, block: bytes) -> str:
        """Return what is wrong with the length before a wrong header, if that can be seen.

        A length that counts characters is too short, so the last bytes of its message are read as
        the beginning of a header.
        """
        if not self._last:
            return ""
        end = block.find(b"Content-")
        if end < 0:
            end = len(block)
        # A newline after the message does not belong to it.
        whole = (self._last + block[:end].rstrip(b"\r\n")).decode("utf-8", "replace")
        # JavaScript counts UTF-16 code units.
        counts = (len(whole), len(whole.encode("utf-16-le", "replace")) // 2)
        if len(self._last) not in counts:
            return ""
        return (
            f"; the Content-Length before it, {len(self._last)}, counts the characters of the "
            "message: count its bytes, not characters"
        )


def _number(length: bytes) -> int:
    if length.startswith(b"-") and length[1:].isdigit():
        raise _WrongHeader(f"expected a Content-Length of 0 or more, got {_quoted(length)}")
    if not length.isdigit():
        raise _WrongHeader(f"expected a number as Content-Length, got {_quoted(length)}")
    if len(length) > DIGITS:
        raise _WrongHeader(
            f"expected a Content-Length of at most {DIGITS} digits, got {_quoted(length)}"
        )
    return int(length)


def _check_type(value: bytes) -> None:
    """Refuse a message that is not UTF-8."""
    charset = _CHARSET.search(value)
    # "utf8" is in the first editions of the Language Server Protocol.
    if charset is not None and charset[1].lower() not in (b"utf-8", b"utf8"):
        raise _WrongHeader(f"expected charset=utf-8 in Content-Type, got {_quoted(charset[1])}")


def _quoted(text: bytes) -> str:
    quoted = ascii(text[:QUOTED].decode("latin-1"))
    if len(text) > QUOTED:
        quoted += " and more"
    return quoted


class SocketSplitter(Splitter):
    """Cuts the bytes of a socket into lines.

    The first line must begin an object or an array. So a web page that sends an HTTP request to a
    port of the loopback cannot call methods with its body.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.broken = None
        self._is_first = True

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete."""
        if self.broken is not None:
            return []
        return self._checked(super().feed(data))

    def rest(self) -> list[bytes]:
        """Return the last line, which has no newline."""
        if self.broken is not None:
            return []
        return self._checked(super().rest())

    def _checked(self, lines: list[bytes]) -> list[bytes]:
        if self._is_first and lines:
            self._is_first = False
            if not lines[0].lstrip().startswith((b"{", b"[")):
                self.broken = (
                    "expected a JSON object or array on the first line, "
                    f"got {_quoted(lines[0])}; this is not a server of HTTP"
                )
                return []
        return lines


LINES = Framing("lines", Splitter, join_line)
# The lines of a server on a socket.
SOCKET_LINES = Framing("lines", SocketSplitter, join_line)
CONTENT_LENGTH = Framing("content-length", HeaderSplitter, join_header)
