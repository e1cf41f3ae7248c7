"""The filter language of calls: for the console's lists, `wirecall watch` and the feed.

    filter  = term*                        all of them must hold
    term    = ["-"] (NAME ":" value | word | '"' words '"')
    value   = one or more alternatives, separated by commas

A row is the JSON of one call. `tests/console/filters.json` has the cases that this module and the
console's own implementation in JavaScript must agree on.
"""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TypeAlias

from msgspec import Struct

from wirecall.console.source import Refusal
from wirecall.protocol.messages import Json

Row: TypeAlias = Mapping[str, Json]
# Whether a row fits, at a moment in Unix seconds.
Test: TypeAlias = Callable[[Row, float], bool]

# More terms than a person writes; each one costs time for every row.
MAX_TERMS = 50
MAX_LENGTH = 2000

_TERM = re.compile(r'\s*(-?)(?:([A-Za-z_]+):)?((?:"[^"]*"|[^\s"])*)')
_NUMBER = re.compile(r"(>=|<=|>|<|=)?(-?[0-9]+(?:\.[0-9]+)?)(us|ms|s|m)?$")
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d)$")
_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_STATUS = {
    "ok": "ok",
    "error": "error",
    "cancelled": "cancelled",
    "input": "input required",
    "undelivered": "undelivered",
}
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    "=": lambda left, right: left == right,
}
# Names whose values are text, with the member of a row that each is about.
_TEXT = {
    "method": "method",
    "tool": "tool",
    "caller": "caller",
    "key": "key",
    "batch": "batch",
    "worker": "worker",
    "id": "rpc_id",
}
_WORDS = {"kind": ("query", "command"), "transport": ("rpc", "mcp")}
NAMES = (*_TEXT, *_WORDS, "status", "replayed", "duration", "code", "since")
# The members in which a bare word is looked for.
_SEARCHED = ("method", "caller", "key", "call_id", "rpc_id")


class FilterError(Refusal):
    """A filter that cannot be read; `place` is the index of its first wrong character."""

    def __init__(self, place: int, message: str, hint: str) -> None:
        super().__init__(
            400, {"error": {"type": "filter", "message": message, "place": place, "hint": hint}}
        )
        self.place = place
        self.hint = hint


class Filter(Struct, frozen=True):
    """A filter that was read."""

    text: str
    tests: tuple[Test, ...]

    def fits(self, row: Row, now: float) -> bool:
        """Return whether a row fits all terms."""
        return all(test(row, now) for test in self.tests)


def read_filter(text: str) -> Filter:
    """Return the filter that a string describes; the empty one fits every row."""
    if len(text) > MAX_LENGTH:
        raise FilterError(
            MAX_LENGTH,
            f"The filter has {len(text)} characters; expected at most {MAX_LENGTH}.",
            "shorten it",
        )
    tests: list[Test] = []
    place = 0
    end = len(text.rstrip())
    while place < end:
        found = _TERM.match(text, place)
        assert found is not None  # every part of it may be empty
        start = found.start() + len(found[0]) - len(found[0].lstrip())
        if found.end() < end and text[found.end()] == '"':
            raise FilterError(found.end(), "A quote is not closed.", 'write "two words"')
        place = found.end()
        tests.append(_term(start, found[1] == "-", found[2], found[3]))
        if len(tests) > MAX_TERMS:
            raise FilterError(start, f"More than {MAX_TERMS} terms.", "drop some of them")
    return Filter(text, tuple(tests))


def _term(place: int, negated: bool, name: str | None, value: str) -> Test:
    if name is None:
        word = value.replace('"', "").lower()
        if not word:
            raise FilterError(place, "A term is empty.", "drop it, or write a word")
        test = _contains(word)
    else:
        if not value:
            raise FilterError(place, f"{name}: has no value.", f"write one: {name}:VALUE")
        test = _any_of([_named(place, name.lower(), each) for each in _alternatives(value)])
    if negated:
        return lambda row, now: not test(row, now)
    return test


def _alternatives(value: str) -> list[str]:
    """Return the parts of a value between its commas; a quoted comma does not separate."""
    parts = re.findall(r'((?:"[^"]*"|[^,"])+)', value)
    return [part.replace('"', "") for part in parts] or [""]


def _any_of(tests: list[Test]) -> Test:
    if len(tests) == 1:
        return tests[0]
    return lambda row, now: any(test(row, now) for test in tests)


def _contains(word: str) -> Test:
    return lambda row, _now: any(word in str(row.get(name) or "").lower() for name in _SEARCHED)


def _named(place: int, name: str, value: str) -> Test:
    """Return the test of one name and one value."""
    if name in _TEXT:
        return _matches(_TEXT[name], value)
    if name in _WORDS:
        word = _one_of(place, name, value, _WORDS[name])
        return lambda row, _now: row.get(name) == word
    if name == "status":
        word = _one_of(place, name, value, (*_STATUS, "replayed"))
        if word == "replayed":
            return lambda row, _now: row.get("replayed") is True
        outcome = _STATUS[word]
        return lambda row, _now: row.get("outcome") == outcome
    if name == "replayed":
        wanted = _one_of(place, name, value, ("yes", "no")) == "yes"
        return lambda row, _now: row.get("replayed") is wanted
    if name == "duration":
        return _compares(place, "ms", value, has_unit=True)
    if name == "code":
        return _compares(place, "code", value, has_unit=False)
    if name == "since":
        return _since(place, value)
    near = get_close_matches(name, NAMES, 1)
    hint = f"did you mean {near[0]}:?" if near else f"known are {', '.join(NAMES)}"
    raise FilterError(place, f"There is no filter {name}:.", hint)


def _one_of(place: int, name: str, value: str, known: tuple[str, ...]) -> str:
    if value.lower() in known:
        return value.lower()
    raise FilterError(
        place, f"{name}: expected one of {', '.join(known)}, got {value!r}.", f"{name}:{known[0]}"
    )


def _matches(member: str, value: str) -> Test:
    """Return whether a member is the value; * stands for any characters."""
    pattern = re.compile(".*".join(map(re.escape, value.lower().split("*"))), re.DOTALL)

    def test(row: Row, _now: float) -> bool:
        return pattern.fullmatch(str(row.get(member) or "").lower()) is not None

    return test


def _compares(place: int, member: str, value: str, *, has_unit: bool) -> Test:
    found = _NUMBER.match(value)
    example = "duration:>500ms" if has_unit else "code:>=500"
    if found is None or (found[3] and not has_unit):
        raise FilterError(place, f"Expected a number, got {value!r}.", example)
    number = float(found[2])
    if has_unit:
        number *= _MS[found[3] or "ms"]
    compare = _COMPARED[found[1] or "="]

    def test(row: Row, _now: float) -> bool:
        seen = row.get(member)
        return isinstance(seen, (int, float)) and compare(seen, number)

    return test


def _since(place: int, value: str) -> Test:
    found = _AGE.match(value)
    if found is None:
        raise FilterError(place, f"Expected a time such as 10m, got {value!r}.", "since:10m")
    age = float(found[1]) * _SECONDS[found[2]]

    def test(row: Row, now: float) -> bool:
        at = row.get("at")
        return isinstance(at, (int, float)) and at >= now - age

    return test
