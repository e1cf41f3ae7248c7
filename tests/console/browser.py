"""A console in a separate thread, and an installed Chromium that looks at it.

A page of `Looker` fails its test if the browser reports an error, or a breach of the policy.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

from wirecall.console.listener import Listener, open_listener
from wirecall.console.source import ListenerSettings, Source

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

T = TypeVar("T")

# Milliseconds for anything that a page waits for; the machine may be busy.
PATIENCE = 30_000
# Without these Chromium asks hosts of its makers.
FLAGS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
]


def missing() -> str:
    """Return why there is no browser; "" if there is one."""
    if os.environ.get("WIRECALL_BROWSER") == "off":
        return "WIRECALL_BROWSER=off"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install playwright"
    if program() is None:
        return "no browser: apt-get install chromium"
    return ""


def _skip(why: str) -> NoReturn:
    """Skip the test; with WIRECALL_BROWSER=required, fail it."""
    if os.environ.get("WIRECALL_BROWSER") == "required":
        pytest.fail(why)
    pytest.skip(why)


def program() -> str | None:
    return os.environ.get("WIRECALL_CHROMIUM") or shutil.which("chromium")


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Run the installed browser; skip the test if it does not start."""
    why = missing()
    if why:
        _skip(why)
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=program(), args=FLAGS)
        except Error as error:
            _skip(f"the browser does not start: {str(error)[:300]}")
        try:
            yield found
        finally:
            found.close()


def until(page: "Page", expression: str, wanted: Any = True) -> None:
    """Wait until an expression has a value in the page.

    The policy of the console forbids `wait_for_function`, which evaluates strings in the page.
    """
    for _ in range(PATIENCE // 50):
        found = page.evaluate(expression)
        if found == wanted:
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"{expression} is {found!r}, expected {wanted!r}")


class Console:
    """A console that serves a source in a thread, on its own port."""

    def __init__(self, source: Source, *, readonly: bool = False, port: int = 0) -> None:
        self.source = source
        # Those that look at it leave before it stops.
        self.lookers: list[Looker] = []
        self._settings = ListenerSettings(port=port, readonly=readonly)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Console":
        self._thread.start()
        self.listener: Listener = self.run(open_listener(self.source, self._settings))
        self.url = self.listener.url
        return self

    def __exit__(self, *_: object) -> None:
        for looker in self.lookers:
            looker.leave()
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def stop(self) -> None:
        self.run(self.listener.aclose())

    def start_again(self) -> None:
        """Listen on the same port, with the same sessions."""
        port = int(self.url.rpartition(":")[2])
        before = self.listener
        self.listener = self.run(open_listener(self.source, ListenerSettings(port=port)))
        self.listener.signin = before.signin

    def link(self) -> str:
        return self.call(self.listener.link)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop of the console."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def call(self, work: Callable[[], T]) -> T:
        """Call a function in the loop of the console."""

        async def now() -> T:
            return work()

        return self.run(now())


class Looker:
    """Opens pages of a browser, and collects what it complains about."""

    def __init__(self, browser: "Browser") -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.complaints: list[str] = []
        # Complaints that contain one of these are expected.
        self.expected: list[str] = []

    def open(self, console: Console, path: str = "/", **options: Any) -> "Page":
        """Sign in with a new context, and show a page."""
        if self not in console.lookers:
            console.lookers.append(self)
        page = self.page(**options)
        secret = console.link().partition("#")[2]
        page.goto(f"{console.url}{path}#{secret}")
        page.wait_for_selector("header.top")
        return page

    def page(self, **options: Any) -> "Page":
        """Return an empty page in a new context."""
        context = self._browser.new_context(**options)
        context.set_default_timeout(PATIENCE)
        self._contexts.append(context)
        return self.watched(context.new_page())

    def watched(self, page: "Page") -> "Page":
        page.on("console", lambda entry: self._note(entry.type, entry.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))
        return page

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(each in text for each in self.expected):
            self.complaints.append(text)

    def leave(self) -> None:
        for context in self._contexts:
            context.close()
        self._contexts.clear()

    def close(self) -> None:
        self.leave()
        assert self.complaints == [], f"the browser complained: {self.complaints}"
