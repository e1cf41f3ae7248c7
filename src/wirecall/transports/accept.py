"""The `Accept` header of a batch: an array, or a stream of answers (RFC 9110, section 12.5.1).

The client prefers what it gives the higher `q`. The array wins a tie, so that `*/*`, or no header
at all, gets an array. Among streams the first of `STREAMS` wins.
"""

from functools import lru_cache
from typing import Literal, TypeAlias

from msgspec import Struct

from wirecall.transports.request import EVENT_STREAM, JSON, HttpError

JSONL = "application/jsonl"
NDJSON = "application/x-ndjson"
JSON_SEQ = "application/json-seq"

StreamType: TypeAlias = Literal[
    "application/jsonl", "application/x-ndjson", "application/json-seq", "text/event-stream"
]
STREAMS: tuple[StreamType, ...] = (
    "application/jsonl",
    "application/x-ndjson",
    "application/json-seq",
    "text/event-stream",
)
assert STREAMS == (JSONL, NDJSON, JSON_SEQ, EVENT_STREAM)

# Other names for an array, from the drafts about JSON-RPC over HTTP.
OTHER_NAMES = ("application/json-rpc", "application/jsonrequest")

ORDERS = ("completion", "input")


class Choice(Struct, frozen=True):
    """What a client gets for an array of requests."""

    # The type of a stream. None: an array.
    stream: StreamType | None = None
    in_input_order: bool = False
    # Whether the client takes an array, too.
    takes_array: bool = True


class _Range(Struct, frozen=True):
    """One element of the header."""

    media: str
    q: float
    in_input_order: bool = False

    def fits(self, media: str) -> int:
        """Return how exactly this names a type; 0 if it does not."""
        if self.media == media:
            return 3
        if self.media == media.partition("/")[0] + "/*":
            return 2
        return int(self.media == "*/*")


@lru_cache(maxsize=64)  # clients send few different ones
def chosen(accept: str, *, streams: bool) -> Choice:
    """Return what a client prefers.

    HttpError 406 if it accepts nothing that there is, and 400 if the header is malformed. `streams`
    says whether the server streams.
    """
    ranges = [_read(element) for element in _split(accept, ",") if element.strip()]
    if not ranges:  # an empty header accepts everything
        return Choice()
    named = [each.q for each in ranges if each.media in OTHER_NAMES]
    array = max(_best(ranges, JSON).q, *named, 0.0)
    if streams:
        # `max` returns the first of equal ones.
        best, media = max(
            ((_best(ranges, each), each) for each in STREAMS), key=lambda pair: pair[0].q
        )
        if best.q > array:
            return Choice(media, best.in_input_order, takes_array=array > 0)
    if array > 0:
        return Choice()
    there = JSON
    if streams:
        there = ", ".join((JSON, *STREAMS))
    raise HttpError(406, f"Accept: expected one of {there}; got {accept[:100]}")


@lru_cache(maxsize=64)
def prefers_events(accept: str) -> bool:
    """Return whether a client prefers server-sent events to one JSON document."""
    ranges = [_read(element) for element in _split(accept, ",") if element.strip()]
    if not ranges:
        return False
    return _best(ranges, EVENT_STREAM).q > _best(ranges, JSON).q


_NONE = _Range("", 0.0)


def _best(ranges: list[_Range], media: str) -> _Range:
    """Return the range that names a type most exactly; one with q=0 if none does."""
    found = max(ranges, key=lambda each: each.fits(media))
    if not found.fits(media):
        return _NONE
    return found


def _read(element: str) -> _Range:
    media, *parameters = _split(element, ";")
    q = 1.0
    in_input_order = False
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        value = value.strip().strip('"')
        match name.strip().lower():
            case "q":
                q = _quality(value)
            case "order":
                if value not in ORDERS:
                    raise HttpError(
                        406, f"Accept: expected order=completion or order=input, got {value[:40]!r}"
                    )
                in_input_order = value == "input"
    return _Range(media.strip().lower(), q, in_input_order)


def _quality(value: str) -> float:
    try:
        q = float(value)
    except ValueError:
        q = -1.0
    if not 0 <= q <= 1:
        raise HttpError(400, f"Accept: expected q from 0 to 1, got {value[:40]!r}")
    return q


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside of quotes."""
    if '"' not in text:
        return text.split(separator)
    parts = [""]
    is_quoted = False
    for sign in text:
        if sign == '"':
            is_quoted = not is_quoted
        if sign == separator and not is_quoted:
            parts.append("")
        else:
            parts[-1] += sign
    return parts
