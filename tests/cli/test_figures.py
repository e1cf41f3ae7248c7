"""The figures of `wirecall bench`: percentiles, histogram, arrivals, thresholds."""

import math
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirecall.cli.figures import (
    FINENESS,
    NAMES,
    Check,
    Latencies,
    NotACheck,
    arrivals,
    bars,
    milliseconds,
)

SECONDS = st.floats(1e-7, 1000.0)
WIDTH = 1.0 / FINENESS


def counted(values: list[float]) -> Latencies:
    latencies = Latencies()
    for value in values:
        latencies.add(value)
    return latencies


@given(st.lists(SECONDS, min_size=1), st.floats(0, 100))
def test_percentile_is_within_a_bucket_of_the_exact_one(
    values: list[float], percent: float
) -> None:
    exact = sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]
    found = counted(values).percentile(percent)
    assert exact <= found * (1 + 1e-12)
    assert found <= exact * (1 + WIDTH) + 1e-12


@given(st.lists(SECONDS, min_size=1), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_do_not_fall(values: list[float], one: float, other: float) -> None:
    latencies = counted(values)
    assert latencies.percentile(min(one, other)) <= latencies.percentile(max(one, other))
    assert latencies.percentile(100) == max(values)


@given(st.lists(SECONDS))
def test_rows_hold_every_call_and_have_no_gap(values: list[float]) -> None:
    rows = counted(values).rows()
    assert sum(row.count for row in rows) == len(values)
    assert all(one.end == other.start for one, other in pairwise(rows))
    if rows:
        assert rows[0].count and rows[-1].count
        assert rows[0].start / 1000 <= min(values) * (1 + WIDTH)
        assert max(values) <= rows[-1].end / 1000 * (1 + 1e-12)


@given(st.lists(SECONDS, min_size=1))
def test_bars_show_every_row_that_has_calls(values: list[float]) -> None:
    rows = counted(values).rows()
    shown = bars(rows, 10)
    assert len(shown) == len(rows)
    for row, (_, bar, _, _) in zip(rows, shown, strict=True):
        assert bool(bar) == bool(row.count)
        assert len(bar) <= 10
    assert all(sign.isascii() for line in shown for sign in "".join(line))


def test_latencies_of_no_call_are_zero() -> None:
    assert Latencies().rows() == []
    assert bars([]) == []
    assert set(Latencies().named().values()) == {0.0}


@given(st.floats(0.001, 100), st.integers(1, 5000))
def test_unsent_calls_all_count_and_none_is_older_than_the_oldest(
    oldest: float, count: int
) -> None:
    latencies = Latencies()
    latencies.add_unsent(oldest, count)
    assert latencies.count == count
    assert latencies.max <= oldest
    assert latencies.total / count == pytest.approx(oldest / 2, rel=0.5)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0.0421, "42.1 us"),
        (0.5, "500 us"),
        (1, "1 ms"),
        (1.234, "1.23 ms"),
        (20, "20 ms"),
        (123.4, "123 ms"),
        (5000, "5 s"),
        (61234, "61.2 s"),
    ],
)
def test_milliseconds_have_three_digits_and_a_unit(number: float, shown: str) -> None:
    assert milliseconds(number) == shown


# --- arrivals -------------------------------------------------------------------------------------

COUNTS = st.integers(1, 500)
DURATIONS = st.floats(0.01, 600)


@given(COUNTS, DURATIONS, st.sampled_from(["even", "random"]), st.integers())
def test_arrivals_are_all_in_time_and_in_order(
    count: int, seconds: float, kind: Any, seed: int
) -> None:
    due = list(arrivals(count, seconds, kind, seed))
    assert len(due) == count
    assert due == sorted(due)
    assert due[0] >= 0 and due[-1] < seconds
    assert due == list(arrivals(count, seconds, kind, seed))


@given(COUNTS, DURATIONS)
def test_even_arrivals_have_equal_distances(count: int, seconds: float) -> None:
    due = list(arrivals(count, seconds))
    assert due[0] == 0
    assert all(
        other - one == pytest.approx(seconds / count, rel=1e-6, abs=1e-9)
        for one, other in pairwise(due)
    )


def test_random_arrivals_fill_the_time_evenly_on_the_whole() -> None:
    due = list(arrivals(10_000, 10.0, "random", 7))
    for second in range(10):
        # Six standard deviations of a binomial distribution.
        assert abs(sum(1 for each in due if second <= each < second + 1) - 1000) < 180


# --- thresholds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "sign", "value", "is_share"),
    [
        ("p99>20ms", "p99", ">", 20.0, False),
        ("p99.9 >= 1.5 s", "p99.9", ">=", 1500.0, False),
        ("max>250us", "max", ">", 0.25, False),
        ("errors>0", "errors", ">", 0.0, False),
        ("errors > 1 %", "errors", ">", 1.0, True),
        ("rate<500", "rate", "<", 500.0, False),
        ("ratio>3", "ratio", ">", 3.0, False),
    ],
)
def test_check_is_read(text: str, name: str, sign: str, value: float, is_share: bool) -> None:
    assert Check.read(text) == Check(text, name, sign, value, is_share)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("p99", "expected NAME, one of > >= < <=, and a number, as in errors>0; got 'p99'"),
        ("p99>", "got 'p99>'"),
        ("p99=20ms", "got 'p99=20ms'"),
        ("p99>-1ms", "got 'p99>-1ms'"),
        ("p99>nan", "got 'p99>nan'"),
        ("", "got ''"),
        ("p98>1ms", "expected one of p50, p95, p99, p99.9, max"),
        ("p99>20", "p99 is a time, expected a number with us, ms or s, got 20"),
        ("p99>20%", "p99 is a time, expected a number with us, ms or s, got 20%"),
        ("errors>1ms", "errors is not a time, expected a number, got 1ms"),
        ("ratio>3%", "ratio is not a time, expected a number, got 3%"),
    ],
)
def test_check_that_cannot_be_read_says_why(text: str, why: str) -> None:
    with pytest.raises(NotACheck) as raised:
        Check.read(text)
    assert why in raised.value.why
    assert raised.value.fix


@given(st.sampled_from(NAMES), st.sampled_from([">", ">=", "<", "<="]), st.integers(0, 999))
def test_check_holds_as_its_sign_says(name: str, sign: str, value: int) -> None:
    is_time = name in Latencies().named()
    text = f"{name}{sign}{value}{'ms' if is_time else ''}"
    check = Check.read(text)
    for found in (value - 1, value, value + 1):
        assert check.holds({name: found}, 10) == eval(f"{found} {sign} {value}")


def test_check_of_a_share_counts_in_percent_of_all_calls() -> None:
    check = Check.read("errors>1%")
    assert not check.holds({"errors": 10}, 1000)
    assert check.holds({"errors": 11}, 1000)


@given(st.text())
def test_check_refuses_or_reads_any_text(text: str) -> None:
    with suppress(NotACheck):
        assert Check.read(text).name in NAMES
