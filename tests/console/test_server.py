"""The console of a real server: `wirecall serve --console`, with two workers and a real ledger."""

import http.client
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]
import pytest

from tests.console.browser import Looker, until
from tests.console.processes import Running
from tests.faults.proxy import Proxy
from tests.ports import free_port
from wirecall.audit import verify
from wirecall.console.ring import SIZE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

APP = """
import logging
import os

from wirecall import App

app = App("shop")


@app.query
async def price(item: str) -> int:
    return len(item)


@app.query
def who() -> int:
    return os.getpid()


@app.command(destructive=False)
async def charge(order: str, cents: int) -> str:
    logging.getLogger("shop").warning("charging %s", order)
    return f"charged {order}"
"""
SETTINGS = """
[server]
app = "shop.py"
workers = 2
[ledger]
url = "sqlite:shop.db"
[audit]
file = "audit.jsonl"
[console]
enabled = true
port = 0
[metrics]
http = "127.0.0.1:0"
token = "env:SHOP_METRICS"
"""


class Caller:
    """One connection to a server: all its calls reach the same worker."""

    def __init__(self, running: Running) -> None:
        address = urlsplit(running.wait_for(r"Listening on (\S+)")).netloc
        self._connection = http.client.HTTPConnection(address, timeout=60)

    def send(self, *calls: tuple[str, dict[str, Any]]) -> Any:
        """Send calls as one message."""
        entries = [
            {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            for number, (method, params) in enumerate(calls)
        ]
        message: object = entries
        if len(entries) == 1:
            message = entries[0]
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/rpc", json.dumps(message), headers)
        return json.loads(self._connection.getresponse().read())

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(APP)
    (folder / "wirecall.toml").write_text(SETTINGS)
    words = ["--http", f"127.0.0.1:{free_port()}", "--grace", "3s", "--limit", "depth=32"]
    os.environ["SHOP_METRICS"] = "s3cret-4711"
    with Running(folder, "serve", *words) as made:
        made.wait_for("(Listening)")
        yield made
    assert made.process.returncode == 0


@pytest.fixture(scope="module")
def proxy(running: Running) -> Iterator[Proxy]:
    """Stand between the browser and the console, so that their connection can be cut."""
    link = urlsplit(running.wait_for(r"Console: (\S+)"))
    with Proxy((str(link.hostname), int(link.port or 0))) as made:
        yield made


@pytest.fixture(scope="module")
def page(browser: "Browser", running: Running, proxy: Proxy) -> Iterator["Page"]:
    """Sign in once: the tests of this module use one page, one after another."""
    looker = Looker(browser)
    # A page without a connection complains.
    looker.expected = ["ERR_", "Failed to load"]
    made = looker.page()
    link = urlsplit(running.wait_for(r"Console: (\S+)"))
    made.goto(link._replace(netloc=f"127.0.0.1:{proxy.port}").geturl())
    made.get_by_role("heading", name="Now").wait_for()
    # Before any test has called the server.
    made.keyboard.press("g")
    made.keyboard.press("c")
    made.get_by_role("heading", name="Nothing has been called yet").wait_for()
    yield made
    looker.leave()
    looker.close()


@pytest.fixture
def caller(running: Running) -> Iterator[Caller]:
    with Caller(running) as made:
        yield made


def go(page: "Page", path: str) -> None:
    """Go to a page as a link does."""
    page.evaluate(
        "path => { history.pushState(null, '', path); dispatchEvent(new Event('popstate')); }", path
    )


def test_console_of_a_server_shows_its_calls_and_records(page: "Page", caller: Caller) -> None:
    go(page, "/calls?filter=key:order-7")
    for _ in range(2):
        caller.send(("charge", {"order": "7", "cents": 1, "idempotency_key": "order-7"}))
    page.locator("td", has_text="replayed").first.wait_for()
    assert page.locator("table.calls td.name a", has_text="charge").count() == 2
    page.get_by_role("link", name="charge").last.click()
    page.locator("table.log td", has_text="charging 7").wait_for()
    page.get_by_text("Repeated by").wait_for()
    page.get_by_role("link", name="Ledger").click()
    page.get_by_role("link", name="order-7").click()
    page.locator("svg.states g.now[data-state=done]").wait_for()
    page.get_by_label("Stored result").get_by_text("charged 7").wait_for()
    page.get_by_role("link", name="Methods").click()
    page.get_by_role("link", name="Try price").click()
    page.get_by_label("item", exact=False).first.fill("tea")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("▸ ran in").wait_for()
    page.get_by_label("Answer").get_by_text('"result": 3').wait_for()
    page.get_by_role("link", name="Audit").click()
    page.get_by_role("button", name="Verify the chain").click()
    page.get_by_text("verified up to line").wait_for()


def test_console_exports_a_trail_that_verifies(
    page: "Page", caller: Caller, tmp_path: Path
) -> None:
    caller.send(("charge", {"order": "8", "cents": 1, "idempotency_key": "order-8"}))
    go(page, "/audit")
    with page.expect_download() as saving:
        page.get_by_role("button", name="Export as NDJSON").click()
    saving.value.save_as(tmp_path / "copy.jsonl")
    assert verify(tmp_path / "copy.jsonl").ok
    lines = [json.loads(line) for line in (tmp_path / "copy.jsonl").read_text().splitlines()]
    assert any(line["key"] == "order-8" for line in lines)
    assert any(line.get("action", {}).get("what") == "sign in" for line in lines)


def test_console_shows_the_settings_with_their_origin_and_no_secret(page: "Page") -> None:
    go(page, "/settings")
    page.locator("td", has_text="console.enabled").wait_for()
    rows = {
        name: (value, origin)
        for name, value, origin in (
            line.locator("td").all_inner_texts() for line in page.locator("tbody tr").all()
        )
    }
    assert rows["server.workers"] == ("2", "wirecall.toml:4")
    assert rows["limits.depth"] == ("32", "the command line")
    assert rows["limits.batch"] == ("50", "default")
    assert rows["ledger.url"] == ("sqlite:shop.db", "wirecall.toml:6")
    assert rows["metrics.token"] == ("env:SHOP_METRICS", "wirecall.toml:14")
    assert "s3cret-4711" not in page.content()


def test_console_draws_a_call_as_soon_as_it_has_ended(page: "Page", caller: Caller) -> None:
    """From the answer to the row in the page; `tests.console.first_row` measures how long that takes.

    The bound is for a machine that is busy with other tests.
    """
    go(page, "/calls?filter=kind:command")
    caller.send(("charge", {"order": "s", "cents": 1, "idempotency_key": "slow-order"}))
    page.get_by_role("link", name="charge").first.wait_for()
    page.evaluate(
        """() => { new MutationObserver(() => {
          if (document.body.textContent.includes('swift-order')) window.seen ??= Date.now();
        }).observe(document.body, { subtree: true, childList: true, characterData: true }); }"""
    )
    caller.send(("charge", {"order": "s", "cents": 1, "idempotency_key": "swift-order"}))
    answered = page.evaluate("Date.now()")
    until(page, "window.seen !== undefined")
    assert page.evaluate("window.seen") - answered < 10_000


def test_console_continues_without_a_gap_after_a_break(
    page: "Page", caller: Caller, proxy: Proxy
) -> None:
    go(page, "/calls?filter=key:gap-*")
    page.locator(".live", has_text="live").wait_for()

    def charge(number: int) -> None:
        key = f"gap-{number}"
        caller.send(("charge", {"order": "g", "cents": 1, "idempotency_key": key}))

    charge(1)
    page.locator("td", has_text="gap-1").wait_for()
    with proxy.away():
        page.get_by_text("The server does not answer").wait_for()
        for number in range(2, 8):
            charge(number)
    page.locator("td", has_text="gap-7").wait_for()
    keys = page.locator("table.calls td", has_text="gap-").all_inner_texts()
    assert keys == [f"gap-{number}" for number in range(7, 0, -1)]
    assert page.get_by_text("Lost").count() == 0
    assert page.get_by_text("Earlier rows are not here").count() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGSTOP")
def test_console_says_how_many_rows_were_lost(
    page: "Page", caller: Caller, running: Running
) -> None:
    """A console that stands still while more calls end than a worker keeps."""
    go(page, "/calls")
    page.locator(".live", has_text="live").wait_for()
    caller.send(("the_last_before", {}))
    page.locator("td", has_text="the_last_before").first.wait_for()
    (console,) = [
        each
        for each in psutil.Process(running.process.pid).children(recursive=True)
        if "wirecall.console" in each.cmdline()
    ]
    console.send_signal(signal.SIGSTOP)
    try:
        left = SIZE + 12
        while left:
            size = min(left, 50)
            caller.send(*[("price", {"item": "tea"})] * size)
            left -= size
    finally:
        console.send_signal(signal.SIGCONT)
    page.get_by_text("Lost 12 rows: more came than are kept.").wait_for()


def test_console_greys_the_rows_of_a_worker_that_was_killed(page: "Page", running: Running) -> None:
    go(page, "/calls?filter=method:who")
    page.locator(".live", has_text="live").wait_for()
    pids: set[int] = set()
    while len(pids) < 2:
        # Another connection may reach another worker.
        with Caller(running) as caller:
            pids.add(caller.send(("who", {}))["result"])
    until(
        page,
        "new Set([...document.querySelectorAll('table.calls tr[data-worker]')]"
        ".map(row => row.dataset.worker)).size",
        2,
    )
    assert page.locator("tr.gone").count() == 0
    victim = pids.pop()
    os.kill(victim, signal.SIGKILL)
    page.locator("tr.gone", has_text="(ended)").first.wait_for()
    gone = {row.get_attribute("data-worker") for row in page.locator("tr.gone").all()}
    alive = {
        row.get_attribute("data-worker") for row in page.locator("tr[data-worker]:not(.gone)").all()
    }
    assert len(gone) == 1 and alive and not gone & alive
    go(page, "/")
    line = page.locator("tr.gone", has_text=str(victim))
    line.get_by_text("! ended").wait_for()
    # The server has replaced it.
    until(page, "document.querySelectorAll('[aria-label=Workers] tbody tr:not(.gone)').length", 2)
