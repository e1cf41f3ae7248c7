"""Makes the pictures of the console for docs/console.md and README: `make pictures`.

They show the facts of `tests.console.shop`, in the light and in the dark scheme. A picture of the
browser differs a little from machine to machine, so no test compares them.
"""

from pathlib import Path
from typing import Any

from tests.console.browser import Console, Looker, chromium
from tests.console.shop import BATCH, shop

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
MOST = 150_000
SIZE = {"width": 1120, "height": 620}


def draw() -> None:
    """Write all pictures."""
    source = shop()
    paths = {
        "now": "/",
        "calls": "/calls",
        "batch": f"/batches/{BATCH}",
        "record": f"/ledger/{next(iter(source.records))}",
    }
    with chromium() as browser, Console(source) as console:
        looker = Looker(browser)
        for scheme in ("light", "dark"):
            options: dict[str, Any] = {"viewport": SIZE, "color_scheme": scheme}
            page = looker.open(console, **options, timezone_id="UTC")
            for name, path in paths.items():
                page.goto(console.url + path)
                page.locator("main h1").wait_for()
                page.locator(".live", has_text="live").wait_for()
                page.wait_for_timeout(500)
                file = FOLDER / f"console-{name}-{scheme}.png"
                page.screenshot(path=file)
                assert file.stat().st_size < MOST, file
        looker.leave()
        looker.close()


if __name__ == "__main__":
    draw()
