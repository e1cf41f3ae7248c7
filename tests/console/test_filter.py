"""The filter language: every case of `filters.json`, which the console's JavaScript runs too."""

import json
from pathlib import Path
from typing import Any

import pytest

from wirecall.console.filter import NAMES, FilterError, read_filter

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "filters.json").read_text())


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["filter"] or "(empty)")
def test_filter_case(case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(FilterError) as raised:
            read_filter(case["filter"])
        assert raised.value.place == case["error"]
        assert raised.value.hint
        return
    found = read_filter(case["filter"])
    matches = [row["id"] for row in DATA["rows"] if found.fits(row, DATA["now"])]
    assert matches == case["matches"]


def test_filter_every_name_has_a_case() -> None:
    text = " ".join(case["filter"] for case in DATA["cases"])
    assert [name for name in NAMES if f"{name}:" not in text] == []


def test_filter_suggests_the_nearest_name() -> None:
    with pytest.raises(FilterError) as raised:
        read_filter("metod:charge")
    assert raised.value.hint == "did you mean method:?"


def test_filter_refuses_a_long_one() -> None:
    with pytest.raises(FilterError, match="characters"):
        read_filter("a" * 3000)
    with pytest.raises(FilterError, match="terms"):
        read_filter("a " * 60)
