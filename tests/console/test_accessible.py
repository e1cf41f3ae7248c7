"""axe-core finds nothing on any page, in both themes."""

import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.console.browser import Console, Looker, until
from tests.console.scripted import ScriptedSource
from tests.console.shop import PAGES, address
from tests.mcp.node import installed

if TYPE_CHECKING:
    from playwright.sync_api import Page

AXE = "axe-core@4.14.0"
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# A theme changes the colours and nothing else of a page.
COLOURS = ["color-contrast", "link-in-text-block"]


@pytest.fixture(scope="module")
def axe() -> str:
    try:
        folder = installed(AXE)
    except (RuntimeError, subprocess.SubprocessError) as error:
        pytest.skip(f"npm cannot be reached: {str(error)[-300:]}")
    return (folder / "axe-core" / "axe.min.js").read_text()


def violations(page: "Page", axe: str) -> list[str]:
    """Return what axe finds in the light theme, and then in the dark one of the same page."""
    page.evaluate(f"globalThis.axe ?? (() => {{ {axe} }})()")
    found = _run(page, {"type": "tag", "values": TAGS})
    page.emulate_media(color_scheme="dark")
    found += [f"dark: {each}" for each in _run(page, {"type": "rule", "values": COLOURS})]
    page.emulate_media(color_scheme="light")
    return found


def _run(page: "Page", only: dict[str, Any]) -> list[str]:
    found: Any = page.evaluate(
        "only => axe.run(document, { runOnly: only, resultTypes: ['violations'] })", only
    )
    return [
        f"{each['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
        for each in found["violations"]
        for node in each["nodes"]
    ]


def visit(page: "Page", path: str) -> None:
    """Go to a page as a link does: axe-core stays loaded."""
    page.evaluate(
        "path => { history.pushState(null, '', path); dispatchEvent(new Event('popstate')); }", path
    )
    until(page, "location.pathname + location.search", path)
    page.wait_for_timeout(100)


def test_accessible_pages_in_both_themes(
    looker: Looker, console: Console, source: ScriptedSource, axe: str
) -> None:
    page = looker.open(console, color_scheme="light", bypass_csp=True)
    found = {}
    for path in PAGES:
        visit(page, address(source, path))
        page.locator("main h1").wait_for()
        until(page, "!document.body.textContent.includes('Reading…')")
        found[path] = violations(page, axe)
    visit(page, address(source, "/ledger/RECORD"))
    page.get_by_role("button", name="Resolve…").click()
    page.get_by_role("radio", name="It happened").check()
    found["resolve"] = violations(page, axe)
    assert {path: problems for path, problems in found.items() if problems} == {}
