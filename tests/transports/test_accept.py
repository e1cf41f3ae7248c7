"""The `Accept` header of a batch: which form of its answers a client prefers (RFC 9110)."""

import pytest

from wirecall.transports.accept import Choice, chosen
from wirecall.transports.request import HttpError

JSONL = Choice("application/jsonl", takes_array=False)
ARRAY = Choice()


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", ARRAY),
        (" , ", ARRAY),
        ("*/*", ARRAY),
        ("application/*", ARRAY),
        ("application/json", ARRAY),
        ("APPLICATION/JSON", ARRAY),
        ("application/jsonrequest", ARRAY),
        ("application/jsonl", JSONL),
        ("Application/JsonL", JSONL),
        ("application/jsonl; charset=utf-8", JSONL),
        ("application/jsonl, text/html", JSONL),
        ("application/x-ndjson", Choice("application/x-ndjson", takes_array=False)),
        ("application/json-seq", Choice("application/json-seq", takes_array=False)),
        ("text/event-stream", Choice("text/event-stream", takes_array=False)),
        ("text/*", Choice("text/event-stream", takes_array=False)),
        # The higher q counts, and the array wins a tie.
        ("application/jsonl, application/json", ARRAY),
        ("application/jsonl, application/json;q=0.9", Choice("application/jsonl")),
        ("application/jsonl;q=0.9, application/json", ARRAY),
        ("application/jsonl, */*;q=0.1", Choice("application/jsonl")),
        ("application/jsonl;q=0.3, application/json;q=0.3", ARRAY),
        ("application/jsonl;q=0, */*", ARRAY),
        ("*/*;q=0.5, text/event-stream;q=0.7", Choice("text/event-stream")),
        # Between streams, too.
        (
            "text/event-stream, application/jsonl;q=0.5",
            Choice("text/event-stream", takes_array=False),
        ),
        ("text/event-stream, application/jsonl", JSONL),
        # The most exact name of a type counts.
        ("application/*, application/json;q=0.2", Choice("application/jsonl")),
        ("*/*, application/json;q=0", JSONL),
        # The order is that of the range that names the type.
        ("application/jsonl;order=input", Choice("application/jsonl", True, False)),
        ('application/jsonl; order="input"; q=1.0', Choice("application/jsonl", True, False)),
        ("application/jsonl;order=completion", JSONL),
        ("text/event-stream;order=input;q=0.1, application/jsonl", JSONL),
        ('application/jsonl; title="a, b; c"', JSONL),
    ],
)
def test_accept_chooses(accept: str, expected: Choice) -> None:
    assert chosen(accept, streams=True) == expected


@pytest.mark.parametrize(
    ("accept", "streams", "status", "reason"),
    [
        ("text/html", True, 406, "expected one of application/json, application/jsonl"),
        ("application/json;q=0", True, 406, "got application/json;q=0"),
        ("*/*;q=0", True, 406, "expected one of"),
        (
            "application/jsonl",
            False,
            406,
            "expected one of application/json; got application/jsonl",
        ),
        ("application/jsonl; order=random", True, 406, "order=completion or order=input"),
        ("application/jsonl; q=2", True, 400, "expected q from 0 to 1, got '2'"),
        ("application/jsonl; q=high", True, 400, "expected q from 0 to 1, got 'high'"),
        ("application/jsonl; q=nan", True, 400, "expected q from 0 to 1, got 'nan'"),
    ],
)
def test_accept_is_refused(accept: str, streams: bool, status: int, reason: str) -> None:
    with pytest.raises(HttpError) as caught:
        chosen(accept, streams=streams)
    assert caught.value.status == status
    assert reason in caught.value.message


def test_accept_of_a_server_without_streams_takes_the_array() -> None:
    assert chosen("application/jsonl, */*;q=0.1", streams=False) == ARRAY
