"""Measures how soon the page of calls draws a call: `python -m tests.console.first_row`.

From the answer of a command to its row, in Chromium, with a real server and its console. A machine
that is busy with other work shows more.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.console.browser import Looker, chromium
from tests.console.processes import Running
from tests.ports import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Page

CALLS = 100
# Milliseconds that 95 of 100 calls may take on a quiet machine.
MOST = 200.0
APP = """
from wirecall import App

app = App("bench", mode="production", ledger="sqlite:ledger.db")


@app.command(destructive=False)
def charge(number: int) -> int:
    return number
"""
# Notes when the page first shows each key.
NOTE = """() => { window.seen = {}; new MutationObserver(() => {
  for (const each of document.querySelectorAll('table.calls td:nth-child(6)'))
    window.seen[each.textContent.trim()] ??= Date.now();
}).observe(document.body, { subtree: true, childList: true, characterData: true }); }"""


def drawn(page: "Page", running: Running, number: int) -> float:
    """Make a call; return the milliseconds from its answer to its row."""
    key = f"row-{number}"
    running.call("charge", number=number, idempotency_key=key)
    answered = float(page.evaluate("Date.now()"))
    while True:
        seen = page.evaluate("key => window.seen[key] ?? null", key)
        if seen is not None:
            return float(seen) - answered
        page.wait_for_timeout(5)


def measure(count: int = CALLS) -> list[float]:
    """Return the milliseconds of some calls, sorted."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        Path(folder, "app.py").write_text(APP)
        words = ["serve", "app.py", "--http", f"127.0.0.1:{free_port()}", "--drain", "0"]
        with Running(Path(folder), *words, "--console", "--console-port", "0") as running:
            looker = Looker(browser)
            page = looker.page()
            page.goto(running.wait_for(r"Console: (\S+)"))
            page.get_by_role("link", name="Calls").click()
            running.call("charge", number=0, idempotency_key="row-0")
            page.get_by_role("link", name="charge").wait_for()
            page.evaluate(NOTE)
            found = sorted(drawn(page, running, number) for number in range(1, count + 1))
            looker.leave()
            looker.close()
    return found


def main() -> int:
    found = measure()
    p95 = found[int(len(found) * 0.95)]
    print(f"from an answer to its row: median {statistics.median(found):.0f} ms, p95 {p95:.0f} ms")
    return int(p95 > MOST)


if __name__ == "__main__":
    sys.exit(main())
