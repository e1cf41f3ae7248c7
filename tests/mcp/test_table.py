"""The table in docs/mcp.md matches the table in the code; test_revisions checks that the server
follows it.
"""

import re
from pathlib import Path

import pytest

from wirecall.mcp import revisions
from wirecall.mcp.revisions import NAMES, REVISIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mcp.md").read_text()

# Each row of the page, and the rows of the code behind it.
ROWS = {
    "`initialize`": ["handshake", "request initialize"],
    "every request describes itself; `server/discover`": ["envelope", "request server/discover"],
    "arrays of messages": ["array"],
    "`ping`, `logging/setLevel`, `resources/subscribe`": [
        *(
            "request ping",
            "request logging/setLevel",
            "request resources/subscribe",
            "request resources/unsubscribe",
        )
    ],
    "`subscriptions/listen`": ["request subscriptions/listen"],
    "completions declared": ["capability completions"],
    "extensions declared": ["capability extensions"],
    "tool annotations": ["tool annotations"],
    "titles, `_meta` of definitions": ["title", "definition meta"],
    "icons, website of the server": ["icons", "website"],
    "structured output": ["structured"],
    "audio content": ["content audio"],
    "resource links as content": ["content resource_link"],
    "forms for the user": ["ask elicitation/create"],
    "pages for the user to open": ["ask elicitation url"],
    "answer to bad arguments": ["bad arguments"],
    "code for a missing resource": ["resource not found"],
    "caching fields, `resultType`": ["caching", "result type"],
    "HTTP sessions": ["http session"],
    "a cut stream can be resumed": ["http resume"],
    "a disconnect cancels the call": ["http disconnect cancels"],
    "headers repeat the body": ["http headers repeat the body"],
}
WORDS = {None: "no", "+": "yes"}


def drawn() -> dict[str, list[str]]:
    table = PAGE.partition("## Revisions")[2].partition("\n\nAn array")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()
    ]
    assert tuple(cells[0][1:]) == NAMES
    return {row[0]: row[1:] for row in cells[2:]}


def test_page_rows_are_rows_of_the_code() -> None:
    assert list(drawn()) == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_page_matches_the_code(row: str) -> None:
    for name in ROWS[row]:
        values = [revision.value(name) for revision in REVISIONS.values()]
        assert drawn()[row] == [WORDS.get(value, str(value)) for value in values], name


def test_unknown_row_raises() -> None:
    with pytest.raises(KeyError):
        REVISIONS["2025-11-25"].has("request tools/cal")


def test_page_names_only_known_revisions() -> None:
    assert set(re.findall(r"\b20\d\d-\d\d-\d\d\b", PAGE)) == set(NAMES)


def test_table_rows_are_all_read_by_code() -> None:
    """A row that no code reads would promise a difference that does not exist."""
    source = "".join(path.read_text() for path in (ROOT / "src" / "wirecall").rglob("*.py"))
    asked = set(re.findall(r"(?:has|value)\(f?\"([^\"]+)\"\)", source))
    kinds = {row.partition("{")[0] for row in asked if "{" in row} | {"request ", "notification "}
    assert [
        row for row in revisions._TABLE if row not in asked and not row.startswith(tuple(kinds))
    ] == []
