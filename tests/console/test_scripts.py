"""The parts of the pages without a page, in Node: the filter language and JSON without loss."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.mcp.node import node
from wirecall.console.filter import FilterError, read_filter

STATIC = Path(__file__).parents[2] / "src" / "wirecall" / "console" / "static"
CASES = json.loads((Path(__file__).parent / "filters.json").read_text())


def run(script: str, given: Any = None) -> Any:
    """Return what a module prints as JSON; it gets `given`."""
    done = subprocess.run(
        [node(), "--input-type=module", "--eval", f"const given = {json.dumps(given)};\n{script}"],
        cwd=STATIC,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def results() -> list[Any]:
    script = """
    import { FilterError, readFilter } from "./filter.js";
    const made = given.cases.map(({ filter }) => {
      try {
        const fits = readFilter(filter);
        return { matches: given.rows.filter((row) => fits(row, given.now)).map((row) => row.id) };
      } catch (error) {
        if (!(error instanceof FilterError)) throw error;
        return { error: error.place };
      }
    });
    console.log(JSON.stringify(made));
    """
    found: list[Any] = run(script, CASES)
    return found


@pytest.mark.parametrize("number", range(len(CASES["cases"])))
def test_filter_cases_in_javascript(results: list[Any], number: int) -> None:
    case = CASES["cases"][number]
    assert {"filter": case["filter"], **results[number]} == case


@pytest.mark.parametrize("text", ['a"b', "x:y:z", "-", '""', 'method:""', "duration:>", "a,b", "*"])
def test_filter_odd_text_is_read_alike(text: str) -> None:
    script = """
    import { FilterError, readFilter } from "./filter.js";
    try { readFilter(given); console.log("null"); }
    catch (error) { console.log(JSON.stringify(error.place)); }
    """
    expected = None
    try:
        read_filter(text)
    except FilterError as error:
        expected = error.place
    assert run(script, text) == expected


PUTS: list[tuple[str, list[str | int], str | None, str]] = [
    ("{}", ["a"], "1", '{"a": 1}'),
    ('{"a": 1}', ["a"], "12345678901234567890", '{"a": 12345678901234567890}'),
    ('{"b":1.10,"a":2}', ["a"], "3", '{"b":1.10,"a":3}'),
    ('{"b": 1.10, "a": 2}', ["a"], None, '{"b": 1.10}'),
    ('{"b": 1.10, "a": 2}', ["b"], None, '{"a": 2}'),
    ('{"a": 2}', ["a"], None, "{}"),
    ("{}", ["a", "b"], '"x"', '{"a": {"b": "x"}}'),
    ('{"a": []}', ["a", 0], '""', '{"a": [""]}'),
    ('{"a": [1, 2]}', ["a", 2], "3", '{"a": [1, 2, 3]}'),
    ('{"a": [1, 2]}', ["a", 0], None, '{"a": [2]}'),
    ('{\n  "a": 1\n}', ["b"], "2", '{\n  "a": 1,\n  "b": 2\n}'),
    ('{"a": "}{,"}', ["b"], "1e400", '{"a": "}{,", "b": 1e400}'),
]


@pytest.mark.parametrize(("text", "path", "value", "expected"), PUTS)
def test_json_change_keeps_the_rest(
    text: str, path: list[str | int], value: str | None, expected: str
) -> None:
    script = """
    import { put } from "./json.js";
    console.log(JSON.stringify(put(given.text, given.path, given.value ?? undefined)));
    """
    assert run(script, {"text": text, "path": path, "value": value}) == expected


WRONG = [
    "",
    "{",
    "[1,]",
    '{"a":}',
    '{"a" 1}',
    "{'a': 1}",
    "01",
    "nul",
    '{"a":1} x',
    '"\n"',
    "[" * 99,
]


def test_json_refuses_what_json_does_not_have() -> None:
    script = """
    import { parse } from "./json.js";
    console.log(JSON.stringify(given.map((text) => {
      try { parse(text); return false; } catch { return true; }
    })));
    """
    assert run(script, WRONG) == [True] * len(WRONG)
    assert run(script, ["{}", " [1, -0.5e+3] ", '"\\u00e4"', "null"]) == [False] * 4
