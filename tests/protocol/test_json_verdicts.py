"""What JSON is accepted and what is refused: one frozen verdict each, the same on the fast and on
the slow path.

The fast path is one typed decode of the whole message. An entry that is malformed in the same batch
forces the slow path, which takes the message apart; the verdict on its neighbour must not change.
Verdicts are `ok`, or an error code and whose id it is answered under: `own` for the entry's, `all`
for one error that answers the whole message.
"""

import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.calls import make_app
from wirecall import App, Limits, jsonrpc

app = App("verdicts", mode="development", limits=Limits(batch=1000, bytes_in=12 << 20))


@app.query
def take(value: Any) -> str:
    return "taken"


@app.query
def number(value: float) -> str:
    return "taken"


def entry(value: bytes, method: bytes = b"take") -> bytes:
    return b'{"jsonrpc":"2.0","method":"%b","params":[%b],"id":7}' % (method, value)


ACCEPTED = {
    "a string of two bytes a letter": '"é"'.encode(),
    "a string of four bytes a letter": '"\U0001f600"'.encode(),
    "an escaped pair of surrogates": b'"\\ud83d\\ude00"',
    "an escaped NUL": b'"\\u0000"',
    "spaces of every kind": b" \t[\n1\r,2 ] ",
    "a number that underflows": b"1e-400",
    "minus zero": b"-0.0",
    "an integer beyond 64 bits": b"123456789012345678901234567890",
    "an integer of 4300 digits": b"9" * 4300,
    "duplicate members": b'{"a":1,"a":2}',
    "depth 64": b"[" * 62 + b"]" * 62,  # with the request's own object and array
    "towers of depth 64": b"[" + b",".join([b"[" * 61 + b"]" * 61] * 3) + b"]",
    "a comb of depth 64": b"[[[]]," * 60 + b"[[]]" + b"]" * 60,
    "many brackets side by side": b"[" + b",".join([b"[]"] * 500) + b"]",
    "brackets inside strings": b'"' + b"[" * 500 + b'"',
    "brackets behind an escaped quote": b'"\\"' + b"[" * 500 + b'"',
}

SYNTAX = {
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "invalid UTF-8": b'"\xff"',
    "an overlong encoding": b'"\xc0\xaf"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "a lone surrogate escaped": b'"\\ud800"',
    "surrogates the wrong way round": b'"\\ude00\\ud83d"',
    "a control character": b'"\x01"',
    "an unknown escape": b'"\\x"',
    "a leading zero": b"01",
    "a plus sign": b"+1",
    "a bare point": b".5",
    "a point without digits": b"1.",
    "hexadecimal": b"0x10",
    "a comma too many": b"[1,]",
    "a comma too few": b"[1 2]",
    "single quotes": b"'x'",
    "a comment": b"1 /* one */",
    "a member without a value": b'{"a"}',
    "a name without quotes": b"{a:1}",
    "brackets that do not match": b"[}",
    "True": b"True",
}

OUT_OF_RANGE = {
    "a number beyond every float": b"1e400",
    "an integer of 4301 digits": b"9" * 4301,
    "an integer of a million digits": b"9" * 1_000_000,
}

TOO_DEEP = {
    "depth 65": b"[" * 63 + b"]" * 63,
    "depth 65 of objects": b'{"a":' * 63 + b"1" + b"}" * 63,
    "depth 65 with brackets in strings": b'["]",' * 63 + b"1" + b"]" * 63,
    "depth 65 with quotes in strings": b'["\\"]",' * 63 + b"1" + b"]" * 63,
    "one tower of depth 65 among others": b"["
    + b",".join([b"[" * n + b"]" * n for n in (60, 61, 62, 61, 60)])
    + b"]",
    "a comb of depth 65": b"[[[]]," * 61 + b"[[]]" + b"]" * 61,
    "depth 100,000": b"[" * 100_000 + b"]" * 100_000,
}

BROKEN_NEIGHBOUR = b'{"id":8}'


def verdicts(value: bytes, method: bytes = b"take") -> set[str]:
    """The verdict on an entry alone, in a batch of one, in a good batch, and in one that forces the
    slow path.
    """
    good = entry(b"1")
    alone = verdict(json.loads(app.handle_sync(entry(value, method)) or b""))
    batches = [
        [entry(value, method)],
        [good, entry(value, method)],
        [BROKEN_NEIGHBOUR, entry(value, method)],
    ]
    return {alone, *(in_batch(app.handle_sync(b"[%b]" % b",".join(batch))) for batch in batches)}


def in_batch(reply: bytes | None) -> str:
    answered = json.loads(reply or b"")
    return verdict(answered[-1] if isinstance(answered, list) else answered)


def verdict(answer: dict[str, Any]) -> str:
    if "result" in answer:
        return "ok"
    return f"{answer['error']['code']} {'own' if answer['id'] == 7 else 'all'}"


@pytest.mark.parametrize("name", ACCEPTED)
def test_json_that_is_accepted(name: str) -> None:
    assert verdicts(ACCEPTED[name]) == {"ok"}


@pytest.mark.parametrize("name", SYNTAX)
def test_json_that_is_refused_as_invalid(name: str) -> None:
    """J8."""
    assert verdicts(SYNTAX[name]) == {"-32700 all"}


@pytest.mark.parametrize("method", [b"take", b"number"])
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_numbers_that_do_not_fit_a_float_are_refused_as_invalid_params(
    name: str, method: bytes
) -> None:
    assert verdicts(OUT_OF_RANGE[name], method) == {"-32602 own"}


@pytest.mark.parametrize("name", TOO_DEEP)
def test_json_that_is_refused_as_too_deep(name: str) -> None:
    """J11."""
    assert verdicts(TOO_DEEP[name]) == {"-32600 all"}
    error = json.loads(app.handle_sync(entry(TOO_DEEP[name])) or b"")["error"]
    assert error["data"]["limit"] == "depth"
    assert error["data"]["max"] == 64


@pytest.mark.parametrize(("depth", "expected"), [(64, "ok"), (65, "-32600 all")])
def test_depth_limit_counts_objects_alone_like_arrays(depth: int, expected: str) -> None:
    """J11, without an array in it: the request and its params are two levels."""
    nested = b'{"":' * (depth - 3) + b"{}" + b"}" * (depth - 3)
    data = b'{"jsonrpc":"2.0","method":"take","params":{"value":%b},"id":1}' % nested
    assert verdict(json.loads(app.handle_sync(data) or b"")) == expected


trees = st.recursive(
    st.just(1), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=40
)


@given(trees, st.integers(2, 12))
def test_depth_limit_applies_to_the_deepest_value(tree: Any, limit: int) -> None:
    """J11, whatever the shape."""

    def depth(value: Any) -> int:
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    narrow = make_app(limits=Limits(depth=limit))
    narrow.query(name="take")(lambda *rest: None)
    data = entry(json.dumps(tree, separators=(",", ":")).encode())
    assert verdict(json.loads(narrow.handle_sync(data) or b"")) == (
        "-32600 all" if depth(tree) + 2 > limit else "ok"
    )


def test_number_of_passes_over_a_message_does_not_grow_with_its_depth() -> None:
    """A pass over a megabyte blocks every other call, so a megabyte of nested arrays must not need
    one per level.
    """
    passes = 0

    def count(_frame: object, event: str, function: Any) -> None:
        nonlocal passes
        owner = getattr(function, "__self__", None)
        passes += event == "c_call" and isinstance(owner, bytes) and len(owner) > 100_000

    towers = entry(b"[" + b",".join([b"[" * 60 + b"]" * 60] * 8000) + b"]")
    sys.setprofile(count)
    try:
        reply = app.handle_sync(towers)
    finally:
        sys.setprofile(None)
    assert verdict(json.loads(reply or b"")) == "ok"
    assert passes < 15


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + entry(b"1"),
        entry(b"1").decode().encode("utf-16"),
        entry(b"1").decode().encode("utf-32"),
        entry(b"1") + b"x",
        entry(b"1") + b"\x00",
        b"\x00" + entry(b"1"),
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b'"' + b'\\"' * 100_000,
    ],
    ids=[
        "BOM",
        "UTF-16",
        "UTF-32",
        "trailing",
        "trailing NUL",
        "leading NUL",
        "only [",
        "only {",
        "endless string",
    ],
)
def test_frames_that_are_refused_whole(data: bytes) -> None:
    reply = json.loads(app.handle_sync(data) or b"")
    assert reply["id"] is None
    assert reply["error"]["code"] in (-32700, -32600)
    assert (
        json.loads(jsonrpc.dispatch_line(data, lambda *_: 1) or b"")["error"]["code"]
        == reply["error"]["code"]
    )


def test_invalid_utf8_is_refused_even_in_unused_members() -> None:
    """The decoder itself does not check a raw slice or a skipped member."""
    for data in (
        b'{"jsonrpc":"2.0","method":"nobody","params":["\xff"],"id":7}',
        b'{"jsonrpc":"2.0","method":"take","params":[1],"extra":"\xff","id":7}',
    ):
        assert verdict(json.loads(app.handle_sync(data) or b"")) == "-32700 all"


def test_duplicate_members_use_the_last_one_on_both_paths() -> None:
    twice = (
        b'{"jsonrpc":"2.0","method":"nobody","method":"echo","params":[1],"params":[{"a":1,'
        b'"a":2}],"id":1,"id":7}'
    )
    echo = App("echo", mode="development")
    echo.query(name="echo")(lambda value: value)
    expected = {"jsonrpc": "2.0", "result": {"a": 2}, "id": 7}
    assert json.loads(echo.handle_sync(twice) or b"") == expected
    assert json.loads(echo.handle_sync(b"[1,%b]" % twice) or b"")[1] == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda n: b'"' + b'\\"' * (n // 2),
        lambda n: b"[" * n,
        lambda n: b"[" * (n // 2) + b"]" * (n // 2),
        lambda n: b"[}" * (n // 2),
        lambda n: b'"["' * (n // 3),
        lambda n: b"[" + b"1," * (n // 2) + b"1]",
        lambda n: b"[" + b"[]," * (n // 3) + b"[]]",
        lambda n: b"[" + b'{"a":"[\\""},' * (n // 12) + b"{}]",
        lambda n: b"[[],[[],[[]," * (n // 12),
        lambda n: entry(b"9" * n),
        lambda n: entry(b'"' + b"x" * n + b'"'),
    ],
)
def test_refusal_takes_time_in_proportion_to_the_message(make: Any) -> None:
    """Eight times the bytes take no more than eight times the time, with a wide margin for a shared
    machine.
    """

    def seconds(n: int) -> float:
        data = make(n)
        best = float("inf")
        for _ in range(3):
            started = time.process_time()
            app.handle_sync(data)
            best = min(best, time.process_time() - started)
        return best

    assert seconds(800_000) <= 40 * seconds(100_000) + 0.05


def test_string_of_ten_megabytes_is_refused_by_default() -> None:
    """J11: the default limit of a message is a megabyte."""
    small = App("small", mode="development")
    small.query(take)
    error = json.loads(small.handle_sync(entry(b'"' + b"x" * 10_000_000 + b'"')) or b"")["error"]
    assert error["code"] == -32600
    assert error["data"]["limit"] == "bytes_in"
    assert error["data"]["max"] == 1 << 20
    assert error["data"]["count"] > 10_000_000


@pytest.mark.parametrize(
    "id", [b"9" * 4301, b'"' + b"x" * 4301 + b'"', b"9" * 1_000_000, b"1." + b"0" * 5000]
)
def test_id_that_is_too_long_is_refused(id: bytes) -> None:
    """An id is echoed and logged, so it has a length; within it, every digit comes back (J14)."""
    data = b'{"jsonrpc":"2.0","method":"take","params":[1],"id":%b}' % id
    reply = json.loads(app.handle_sync(data) or b"")
    assert (reply["error"]["code"], reply["id"]) == (-32600, None)
    assert len(app.handle_sync(data) or b"") < 300
    longest = b'{"jsonrpc":"2.0","method":"take","params":[1],"id":%b}' % (b"9" * 4300)
    assert app.handle_sync(longest) == b'{"jsonrpc":"2.0","result":"taken","id":%b}' % (b"9" * 4300)
