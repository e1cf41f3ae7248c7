"""One browser for the tests of a module, and a console for each test."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.console.browser import Console, Looker, chromium
from tests.console.scripted import ScriptedSource
from tests.console.shop import shop

if TYPE_CHECKING:
    from playwright.sync_api import Browser


# Playwright runs an event loop until its browser ends, and other modules have loops too.
@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as found:
        yield found


@pytest.fixture
def looker(browser: "Browser") -> Iterator[Looker]:
    made = Looker(browser)
    yield made
    made.close()


@pytest.fixture
def source() -> ScriptedSource:
    return shop()


@pytest.fixture
def console(source: ScriptedSource) -> Iterator[Console]:
    with Console(source) as made:
        yield made
