"""Streams of events, split into pieces at any place."""

import pytest

from wirecall.errors import BadAnswer
from wirecall.transports.sse import Event, Parser

STREAM = (
    "\ufeff: a comment\n"
    "id: 1\nretry: 500\n\n"  # no data: not an event, but a place to resume from
    "data: one\n\n"
    "event: named\r\ndata: two\r\ndata:three\r\ndata\r\n\r\n"
    "id: 7\rdata:  four\r\r"
    "id: nu\0ll\nretry: soon\ndata: fünf\nunknown: x\n\n"
    "data: cut off"
)
EVENTS = [
    Event("message", "one", "1"),
    Event("named", "two\nthree\n", "1"),
    Event("message", " four", "7"),
    Event("message", "fünf", "7"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 64, 10_000])
def test_events_in_pieces_of_any_size(size: int) -> None:
    parser = Parser()
    data = STREAM.encode()
    found = [
        event
        for start in range(0, len(data), size)
        for event in parser.feed(data[start : start + size])
    ]
    assert found == EVENTS
    assert parser.last_id == "7"
    assert parser.retry == 0.5


def test_event_has_a_limited_size() -> None:
    parser = Parser(max_bytes=100)
    assert parser.feed(b"data: " + b"x" * 50 + b"\n") == []
    with pytest.raises(BadAnswer, match="more than 100 bytes"):
        parser.feed(b"data: " + b"x" * 60 + b"\n")
    with pytest.raises(BadAnswer, match="more than 100 bytes"):
        Parser(max_bytes=100).feed(b"data: " + b"x" * 120)


def test_many_small_events_do_not_count_as_one_large_event() -> None:
    parser = Parser(max_bytes=100)
    assert len(parser.feed(b"data: x\n\n" * 1000)) == 1000
