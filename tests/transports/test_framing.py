"""Framing: bytes in chunks become messages, and messages become bytes. Each wrong header has its
own error.
"""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirecall.errors import UsageError
from wirecall.transports.framing import (
    CONTENT_LENGTH,
    HEADER,
    LINES,
    SOCKET_LINES,
    Framing,
    framing_of,
)

LIMIT = 100


def split(framing: Framing, *chunks: bytes) -> tuple[list[bytes], str | None]:
    """Return the messages of a whole stream, and why it cannot be read further."""
    splitter = framing.splitter(LIMIT)
    messages: list[bytes] = []
    for chunk in chunks:
        messages += splitter.feed(chunk)
    messages += splitter.rest()
    return messages, splitter.broken


def reason(*chunks: bytes) -> str:
    """Return why a stream with headers cannot be read further."""
    _, broken = split(CONTENT_LENGTH, *chunks)
    assert broken is not None
    return broken


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """Return the chunks of a stream that is cut at these places."""
    ends = sorted(place % (len(data) + 1) for place in places)
    starts = [0, *ends]
    return [data[start:end] for start, end in zip(starts, [*ends, len(data)], strict=True)]


# --- both framings --------------------------------------------------------------------------------

JSON_MESSAGES = st.lists(
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3).map(
        lambda value: json.dumps(value, ensure_ascii=False).encode()
    ),
    max_size=6,
)
PLACES = st.lists(st.integers(0, 10_000), max_size=8)


@pytest.mark.parametrize("framing", [LINES, SOCKET_LINES, CONTENT_LENGTH])
@given(messages=JSON_MESSAGES, places=PLACES)
def test_framing_returns_joined_messages_however_they_are_cut(
    framing: Framing, messages: list[bytes], places: list[int]
) -> None:
    data = b"".join(framing.join(message) for message in messages)
    expected = [message[: LIMIT + 1] for message in messages]
    assert split(framing, *cut(data, places)) == (expected, None)


PIECES = st.sampled_from(
    [
        b"Content-Length: 2\r\n",
        b"Content-Length: 3\n",
        b"content-length: 300\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Type: text/plain; charset=latin-1\r\n",
        b"\r\n",
        b"\n",
        b"{}",
        b"{\xc3\xa9}",
        b"x" * 290,
        b"\xff",
        b":",
    ]
)


@pytest.mark.parametrize("framing", [LINES, SOCKET_LINES, CONTENT_LENGTH])
@given(pieces=st.lists(PIECES, max_size=12), places=PLACES)
def test_framing_reads_any_bytes_alike_however_they_are_cut(
    framing: Framing, pieces: list[bytes], places: list[int]
) -> None:
    data = b"".join(pieces)
    assert split(framing, *cut(data, places)) == split(framing, data)


def test_framing_of_unknown_name_lists_the_names() -> None:
    with pytest.raises(UsageError, match='use framing="lines" or "content-length"'):
        framing_of("chunks")


# --- Content-Length -------------------------------------------------------------------------------


def test_content_length_counts_bytes_of_non_ascii_text() -> None:
    message = '{"name":"Zoë"}'.encode()
    assert len(message) == len(message.decode()) + 1
    assert CONTENT_LENGTH.join(message) == b"Content-Length: 15\r\n\r\n" + message
    assert split(CONTENT_LENGTH, CONTENT_LENGTH.join(message)) == ([message], None)


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Length: 2\r\nContent-Type: application/vscode-jsonrpc; charset=utf-8\r\n\r\n",
        b"Content-Type: application/vscode-jsonrpc; charset=utf8\r\nContent-Length: 2\r\n\r\n",
        b"content-length:2\r\n\r\n",
        b"Content-Length:  2 \r\nX-Trace: 7\r\n\r\n",
        b"Content-Length: 2\n\n",
        b"\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_header_is_read_whole_in_every_usual_form(header: bytes) -> None:
    assert split(CONTENT_LENGTH, header, b"{}", header, b"[]") == ([b"{}", b"[]"], None)


def test_content_length_zero_is_an_empty_message() -> None:
    assert split(CONTENT_LENGTH, b"Content-Length: 0\r\n\r\n") == ([b""], None)


def test_content_length_too_short_breaks_the_stream_at_the_next_header() -> None:
    stream = b'Content-Length: 5\r\n\r\n{"a":1}Content-Length: 2\r\n\r\n{}'
    messages, broken = split(CONTENT_LENGTH, stream)
    assert messages == [b'{"a":']
    assert broken is not None
    assert "expected a field of a header, such as Content-Length: 52, got '1}Content-L" in broken
    assert "characters" not in broken


def test_content_length_too_long_waits_and_reports_the_end_of_the_stream() -> None:
    splitter = CONTENT_LENGTH.splitter(LIMIT)
    assert splitter.feed(b"Content-Length: 9\r\n\r\n{}") == []
    assert splitter.broken is None
    assert splitter.rest() == []
    assert splitter.broken is not None
    assert "Content-Length is 9, but the stream ended after 2 bytes" in splitter.broken


@pytest.mark.parametrize("text", ['{"a":"é"}', '{"a":"日本"}'])
def test_content_length_that_counts_characters_is_named(text: str) -> None:
    stream = f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
    assert "count its bytes, not characters" in reason(stream)
    assert "count its bytes, not characters" in reason(stream, stream)


def test_content_length_that_counts_utf16_units_is_named() -> None:
    text = '{"a":"👍"}'
    units = len(text.encode("utf-16-le")) // 2
    stream = f"Content-Length: {units}\r\n\r\n{text}".encode()
    assert "count its bytes, not characters" in reason(stream, stream)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"Content-Length: -5\r\n\r\n", "expected a Content-Length of 0 or more, got '-5'"),
        (b"Content-Length: ten\r\n\r\n", "expected a number as Content-Length, got 'ten'"),
        (b"Content-Length: 2.0\r\n\r\n", "expected a number as Content-Length, got '2.0'"),
        (b"Content-Length: +2\r\n\r\n", "expected a number as Content-Length, got '+2'"),
        (b"Content-Length:\r\n\r\n", "expected a number as Content-Length, got ''"),
        (b"Content-Length: " + b"9" * 16 + b"\r\n\r\n", "of at most 15 digits, got '9999"),
        (
            b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n",
            "expected one Content-Length, got 2: '2', '3'",
        ),
        (
            b"Content-Length: 2\r\ncontent-length: 2\r\n\r\n",
            "expected one Content-Length, got 2: '2', '2'",
        ),
        (
            b"Content-Type: application/json\r\n\r\n",
            "expected a header with Content-Length, got 'Content-Type",
        ),
        (
            b"Content-Length: 2\r\nContent-Type: text/plain; charset=latin-1\r\n\r\n",
            "expected charset=utf-8 in Content-Type, got 'latin-1'",
        ),
        (
            b"POST /rpc HTTP/1.1\r\nContent-Length: 2\r\n\r\n",
            "expected a field of a header, such as Content-Length: 52, got 'POST /rpc HTTP/1.1'",
        ),
        (b"Content-Len", "the stream ended inside a header: 'Content-Len'"),
    ],
)
def test_wrong_header_breaks_the_stream_with_its_own_reason(header: bytes, expected: str) -> None:
    good = CONTENT_LENGTH.join(b"{}")
    messages, broken = split(CONTENT_LENGTH, good + header)
    assert messages == [b"{}"]
    assert broken is not None
    assert expected in broken


@pytest.mark.parametrize("stream", [b'{"jsonrpc":"2.0"', b"\r\n[", b"{"])
def test_first_message_without_a_header_is_refused_at_once(stream: bytes) -> None:
    """A client with another framing waits for its answer, and sends no more."""
    splitter = CONTENT_LENGTH.splitter(LIMIT)
    assert splitter.feed(stream) == []
    assert splitter.broken is not None
    assert "before the first message" in splitter.broken
    assert "lines" in splitter.broken


def test_stream_that_is_broken_returns_nothing_more() -> None:
    splitter = CONTENT_LENGTH.splitter(LIMIT)
    splitter.feed(b"Content-Length: ten\r\n\r\n")
    assert splitter.feed(CONTENT_LENGTH.join(b"{}")) == []


def test_header_may_have_16_kilobytes_and_no_more() -> None:
    frame = b"Content-Length: 2\r\nX-Pad: %b\r\n\r\n{}"
    room = HEADER - len(frame % b"") + len(b"{}")
    assert split(CONTENT_LENGTH, frame % (b"x" * room)) == ([b"{}"], None)
    assert "expected a header of at most 16384 bytes, got a longer one" in reason(
        frame % (b"x" * (room + 1))
    )


def test_message_above_the_limit_is_cut_and_the_next_one_is_read() -> None:
    stream = CONTENT_LENGTH.join(b"x" * (LIMIT + 50)) + CONTENT_LENGTH.join(b"{}")
    assert split(CONTENT_LENGTH, stream) == ([b"x" * (LIMIT + 1), b"{}"], None)


# --- lines of sockets -----------------------------------------------------------------------------


def test_socket_lines_refuse_the_request_of_a_web_page() -> None:
    request = b'POST / HTTP/1.1\r\nHost: x\r\n\r\n{"jsonrpc":"2.0","id":1,"method":"wipe"}\n'
    messages, broken = split(SOCKET_LINES, request)
    assert messages == []
    assert broken is not None
    assert "expected a JSON object or array on the first line, got 'POST / HTTP/1.1'" in broken


def test_socket_lines_check_only_the_first_line() -> None:
    assert split(SOCKET_LINES, b"\n {}\nPOST\n") == ([b" {}", b"POST"], None)
